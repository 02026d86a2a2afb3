# SPDX-License-Identifier: Apache-2.0
"""The tables of the comparison, and its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import compare_stats as stats
from compare_run import Result
from compare_stats import BASE_OF, SINGLE_NAME, Rounds, Value
from multiturn_stats import Spread

NOTES = """\
Cells are the median over the rounds [least, greatest]; each round's value is the
quantile of its own requests. Ratios are between runs of the same round. All rows:
processes of an engine look for each other's messages without pause for 1 ms, then
every 0.2 ms; as shipped they do so without pause for 1 s. Base: its forward thread is
not bound to a core, and its NIXL progress thread sleeps up to 1 ms where it polls
without pause as shipped. Rows named "as shipped" have all three as they are, and were
run once. Inline: D's transfer loop on its forward thread, a measuring mode. Hand-off:
from the end of the prefill, as P's scheduler sees it, to the scheduling of D's first
step; in connectors: that part of it in which D has asked for the KV too. Own cost: TTFT
beyond the single engine's."""


@dataclass(frozen=True)
class _Column:
    title: str
    value: Value
    factor: float = 1.0
    digits: int = 0


_MS, _S = 1000.0, 1.0
_TIMES = (
    _Column("TTFT p50, ms", stats.ttft(0.5), _MS),
    _Column("TTFT p90, ms", stats.ttft(0.9), _MS),
    _Column("TPOT, ms", stats.tpot, _MS, 1),
    _Column("hand-off p50, ms", stats.part("handoff"), _MS, 1),
    _Column("output tokens/s", stats.output_rate, _S, 1),
)
_PARTS = (
    _Column("until P's end, ms", stats.part("prefill"), _MS, 1),
    _Column("hand-off, ms", stats.part("handoff"), _MS, 1),
    _Column("in connectors, ms", stats.part("connectors"), _MS, 1),
    _Column("until the client's token, ms", stats.part("first_step"), _MS, 1),
)
_COSTS = (
    _Column("P block-s", stats.block_seconds, _S, 2),
    _Column("connector on D's forward thread, ms", stats.hooks("decode"), _MS, 2),
    _Column("p99 of a step, ms", stats.hook_p99("decode"), _MS, 2),
    _Column("on P's, ms", stats.hooks("prefill"), _MS, 2),
    _Column("p99 of a step, ms", stats.hook_p99("prefill"), _MS, 2),
    _Column("in schedulers, ms", stats.scheduler_hooks, _MS, 2),
    _Column("forward threads, s", stats.forward_threads, _S, 2),
    _Column("workers' other threads, s", stats.worker_rest, _S, 2),
    _Column("all CPU, s", stats.cpu, _S, 2),
)
_PROOF = (
    _Column("rate asked, 1/s", lambda result: result.rate, _S, 1),
    _Column("achieved, 1/s", stats.achieved_rate, _S, 2),
    _Column("requests moved", stats.moved_requests),
    _Column("NIXL transfers", stats.counted("transfers", "prefill", "decode"), _S, 1),
    _Column("MB moved", stats.counted("bytes", "prefill", "decode"), 1e-6, 2),
    _Column("descriptors", stats.counted("descriptors", "prefill", "decode")),
    _Column(
        "hit rate P", stats.hit_rate("prefill", "prefix_hits", "prefix_queries"), _S, 2
    ),
    _Column("D, own", stats.hit_rate("decode", "prefix_hits", "prefix_queries"), _S, 2),
    _Column(
        "D, from P",
        stats.hit_rate("decode", "external_hits", "external_queries"),
        _S,
        2,
    ),
    _Column("blocks left", lambda result: result.blocks_left),
)


def report(results: Sequence[Result]) -> str:
    """All tables as Markdown."""
    systems = list(dict.fromkeys(result.system for result in results))
    order = (SINGLE_NAME, *BASE_OF.values(), *BASE_OF)
    systems.sort(key=lambda name: order.index(name) if name in order else 0)
    loads = list(dict.fromkeys(result.load for result in results))
    parts = [NOTES]
    for load in loads:
        parts += [f"### {load}", *_load_tables(results, systems, load)]
    parts += ["### Ratios to the base in the same mode", _ratios(results, loads)]
    parts += ["### Targets", _targets(results, loads)]
    return "\n\n".join(parts)


def differing_answers(results: Sequence[Result]) -> tuple[int, int]:
    """Answers that differ from the first system's in their round, and those compared.

    The requests of a round are the same for every system.
    """
    reference: dict[tuple[str, int, int], tuple[int, ...]] = {}
    compared = differing = 0
    for result in results:
        if result.errors:
            continue
        for number, sample in enumerate(result.samples):
            key = (result.load, result.round, number)
            if key not in reference:
                reference[key] = sample.answer
                continue
            compared += 1
            differing += reference[key] != sample.answer
    return differing, compared


def _load_tables(
    results: Sequence[Result], systems: Sequence[str], load: str
) -> Iterator[str]:
    here = [result for result in results if result.load == load]
    present = [name for name in systems if any(r.system == name for r in here)]
    for title, columns in (
        ("times", _TIMES),
        ("parts of TTFT", _PARTS),
        ("cost, for each request", _COSTS),
        ("proof", _PROOF),
    ):
        found = [stats.rounds(here, column.value) for column in columns]
        head = ["system" if title == "times" else title, *(c.title for c in columns)]
        rows = [
            [
                name,
                *(
                    _cell(of.spread(name, load), column)
                    for of, column in zip(found, columns, strict=True)
                ),
            ]
            for name in present
        ]
        yield _markdown(head, rows)


def _ratios(results: Sequence[Result], loads: Sequence[str]) -> str:
    values = {
        "TTFT p50": stats.ttft(0.5),
        "TTFT p90": stats.ttft(0.9),
        "TPOT": stats.tpot,
        "hand-off": stats.part("handoff"),
        "in connectors": stats.part("connectors"),
        "P block-s": stats.block_seconds,
        "all CPU": stats.cpu,
    }
    found = [stats.rounds(results, value) for value in values.values()]
    head = ["load", "system", *values, "own cost"]
    rows = []
    for load in loads:
        for name, reference in BASE_OF.items():
            cells = [_times(of.ratio(name, reference, load)) for of in found]
            if set(cells) != {"-"}:
                own = own_cost(found[0], load).ratio(name, reference, load)
                rows.append([load, name, *cells, _times(own)])
    return _markdown(head, rows)


def own_cost(ttft: Rounds, load: str) -> Rounds:
    """What the hand-off itself costs: TTFT beyond the single engine's."""
    return ttft.excess(SINGLE_NAME, load)


def _targets(results: Sequence[Result], loads: Sequence[str]) -> str:
    rows = [
        [load, name, verdict]
        for load in loads
        for name, verdict in _verdicts(results, load)
    ]
    return _markdown(["load", "target", "found"], rows)


def _verdicts(results: Sequence[Result], load: str) -> Iterator[tuple[str, str]]:
    p50 = stats.rounds(results, stats.ttft(0.5))
    p90 = stats.rounds(results, stats.ttft(0.9))
    tpots = stats.rounds(results, stats.tpot)
    cost = own_cost(p50, load)
    for ours in ("our-push", "our-pull"):
        base = BASE_OF[ours]
        for name, of in (("p50", p50), ("p90", p90)):
            own, other = of.spread(ours, load), of.spread(base, load)
            if own is not None and other is not None:
                yield (
                    f"{ours} TTFT {name} ≤ base",
                    _verdict(own.median, other.median, own.median <= other.median),
                )
        own, other = tpots.spread(ours, load), tpots.spread(base, load)
        if own is not None and other is not None:
            allowed = other.median + (other.high - other.low)
            yield (
                f"{ours} TPOT ≤ base and its spread",
                _verdict(own.median, allowed, own.median <= allowed),
            )
        own, other = cost.spread(ours, load), cost.spread(base, load)
        if own is not None and other is not None and load.startswith("long"):
            half = other.median / 2
            yield (
                f"{ours} own cost ≤ half the base's",
                _verdict(own.median, half, own.median <= half),
            )
    push, pull = cost.spread("our-push", load), cost.spread("our-pull", load)
    if push is not None and pull is not None:
        yield (
            "our push's own cost < our pull's",
            _verdict(push.median, pull.median, push.median < pull.median),
        )


def _verdict(own: float, bound: float, met: bool) -> str:
    word = "met" if met else "MISSED"
    return f"{word}: {own * 1000:.1f} ms against {bound * 1000:.1f} ms"


def _cell(spread: Spread | None, column: _Column) -> str:
    if spread is None:
        return "-"
    values = (spread.median, spread.low, spread.high)
    middle, low, high = (f"{v * column.factor:,.{column.digits}f}" for v in values)
    return middle if low == high else f"{middle} [{low}, {high}]"


def _times(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f} [{spread.low:.2f}, {spread.high:.2f}]"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
