# SPDX-License-Identifier: Apache-2.0
"""Compiled planner against numpy, beside an idle and beside a busy forward thread.

The planner runs on a thread of its own, as in a worker; the main thread plays the
engine's forward thread and either waits or runs Python code all the time. All
variants run in turn in every round. `released` and `held` are the compiled planner
when it always and when it never gives the GIL up; `native` decides by size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.digests import token_digests
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import NATIVE, Native
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import Shared, pair_regions
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import plan
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

DEADLINE_SECONDS = 120.0
DIGEST_BYTES = 16
TOKENS_PER_BLOCK = 16
BASELINE = "numpy"

# One run of the work; returns the seconds until its first usable part, and in all.
Work = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """One line of the table; `size` in blocks, for digests in tokens."""

    work: str
    size: int
    forward: str


@dataclass
class Run:
    """Every repetition of one variant in one round, in microseconds."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """How long one variant runs in one round."""

    repeats: int
    seconds: float


def variants(native: Native | None) -> dict[str, Native | None]:
    """The implementations to compare, by name."""
    if native is None:
        raise SystemExit(
            "the compiled planner is not built, or VLLM_NIXL_PLANNER is numpy: "
            "install the fork where there is a C++ compiler, unset the variable"
        )
    never = sys.maxsize
    return {
        BASELINE: None,
        "native": native,
        "released": replace(native, pairs=0, indices=0, tokens=0),
        "held": replace(native, pairs=never, indices=never, tokens=never),
    }


def planning(
    blocks: int, layers: int, page_bytes: int, max_bytes: int, fragmented: bool
) -> Callable[[Native | None], Work]:
    """Plan one hand-off and make the indices of all its pieces."""
    count = 2 * blocks + 64
    size = page_bytes * count
    regions = [
        RegionInfo(f"layer.{i}", 0, i * size, page_bytes, page_bytes, count, 0)
        for i in range(layers)
    ]
    (pages,) = pair_regions(Shared(r, r, (0, 0, r.heads)) for r in regions).parts
    want = Want(0, 0, 0, b"")

    def table(seed: int) -> BlockArray:
        if not fragmented:
            return np.arange(seed, seed + blocks, dtype=np.int32)
        shuffled = np.random.default_rng(seed).permutation(count)
        return shuffled[:blocks].astype(np.int32)

    local, remote = [table(1)], [table(2)]

    def variant(native: Native | None) -> Work:
        def work() -> tuple[float, float]:
            started = time.perf_counter()
            pieces = plan(pages, want, local, remote, max_bytes, native)
            first = 0.0
            for piece in pieces:
                # A transfer needs both; a piece's indices go when it is posted.
                _ = piece.local, piece.remote
                first = first or time.perf_counter() - started
            return first, time.perf_counter() - started

        return work

    return variant


def digesting(tokens: int, block: int) -> Callable[[Native | None], Work]:
    """Digest a prompt: whole, or block by block."""
    chosen = random.Random(tokens)
    prompt = [chosen.randrange(150_000) for _ in range(tokens)]

    def variant(native: Native | None) -> Work:
        def work() -> tuple[float, float]:
            started = time.perf_counter()
            token_digests(prompt, block, DIGEST_BYTES, native)
            seconds = time.perf_counter() - started
            return seconds, seconds

        return work

    return variant


def run(work: Work, busy: bool, limits: Limits) -> Run:
    """Repeat the work on another thread."""
    done = Run()

    def planner() -> None:
        until = time.monotonic() + limits.seconds
        while not done.whole or (
            len(done.whole) < limits.repeats and time.monotonic() < until
        ):
            # The thread sleeps between two plans, so it has just got the GIL.
            time.sleep(0.0005)
            first, whole = work()
            done.first.append(first * 1e6)
            done.whole.append(whole * 1e6)

    thread = threading.Thread(target=planner)
    thread.start()
    if busy:
        compute_until_ended(thread)
    thread.join(DEADLINE_SECONDS)
    if thread.is_alive() or not done.whole:
        raise SystemExit("the planner's thread failed or did not end in time")
    return done


def compute_until_ended(planner: threading.Thread) -> int:
    """Run Python code until the thread has ended."""
    value = 1
    until = time.monotonic() + DEADLINE_SECONDS
    while planner.is_alive() and time.monotonic() < until:
        for _ in range(100):
            value = (value * 31 + 7) % 1_000_003
    return value


def compare(
    make: Callable[[Native | None], Work], busy: bool, rounds: int, limits: Limits
) -> dict[str, list[Run]]:
    """The rounds of all variants in turn, each round starting with another one."""
    works = {name: make(native) for name, native in variants(NATIVE).items()}
    results: dict[str, list[Run]] = {name: [] for name in works}
    names = list(works)
    for work in works.values():
        work()
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(run(works[name], busy, limits))
    return results


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def medians(runs: Sequence[Run], what: str) -> list[float]:
    """The median of each round."""
    return [statistics.median(getattr(each, what)) for each in runs]


def percentile_99(runs: Sequence[Run]) -> float:
    """Of the times of all rounds."""
    values = sorted(value for each in runs for value in each.whole)
    return values[min(len(values) - 1, len(values) * 99 // 100)]


def row(case: Case, results: dict[str, list[Run]]) -> str:
    """One line of the table."""
    cells = [case.work, str(case.size), case.forward]
    base = medians(results[BASELINE], "whole")
    cells += [spread(base), spread(medians(results["native"], "whole"))]
    for name in ("native", "released", "held"):
        whole = medians(results[name], "whole")
        cells.append(spread([a / b for a, b in zip(whole, base, strict=True)], 2))
    for name in (BASELINE, "native"):
        cells.append(f"{statistics.median(medians(results[name], 'first')):.0f}")
    cells += [f"{percentile_99(runs):.0f}" for runs in results.values()]
    return f"| {' | '.join(cells)} |"


HEADINGS = (
    "work",
    "size",
    "forward thread",
    "numpy, µs",
    "native, µs",
    "native / numpy",
    "released / numpy",
    "held / numpy",
    "first piece: numpy",
    "native",
    "p99: numpy",
    "native",
    "released",
    "held",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases and print them as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="16,256,1024,8192")
    parser.add_argument("--tokens", default="1024,16384")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument(
        "--page-bytes",
        type=int,
        default=8192,
        help="bytes per block and layer; 8192 is Qwen3-32B at TP 8, 16 tokens a block",
    )
    parser.add_argument("--max-transfer-bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50, help="per round, at most")
    parser.add_argument("--seconds", type=float, default=1.0, help="per round, at most")
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    options = parser.parse_args(arguments)
    limits = Limits(options.repeats, options.seconds)
    cases: list[tuple[str, int, Callable[[Native | None], Work]]] = []
    for blocks in map(int, filter(None, options.blocks.split(","))):
        for kind in ("contiguous", "fragmented"):
            make = planning(
                blocks,
                options.layers,
                options.page_bytes,
                options.max_transfer_bytes,
                kind == "fragmented",
            )
            cases.append((f"plan, {kind}", blocks, make))
    for tokens in map(int, filter(None, options.tokens.split(","))):
        cases.append(("digest, prompt", tokens, digesting(tokens, tokens)))
        cases.append(("digest, blocks", tokens, digesting(tokens, TOKENS_PER_BLOCK)))
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    records = []
    for forward in ("idle", "busy"):
        for work, size, make in cases:
            case = Case(work, size, forward)
            results = compare(make, forward == "busy", options.rounds, limits)
            print(row(case, results), flush=True)
            rounds = {name: [asdict(r) for r in runs] for name, runs in results.items()}
            records.append({**asdict(case), "microseconds": rounds})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
