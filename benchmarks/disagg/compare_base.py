# SPDX-License-Identifier: Apache-2.0
r"""Compares this project's connectors with those of the base wheel.

    python benchmarks/disagg/compare_base.py --output results/compare_base

The systems take turns within each round: a single engine (the floor), the base's
push and pull in a virtual environment of its own, and ours: push, pull, and pull
with the transfer loop on the forward thread. Each serves the same requests. The
loads are those of compare_loads.py; the saturation point of each kind is measured
on the single engine first. Every run leaves a JSON file, all of them a table.

The base's connectors are written for machines on which a worker has cores to spare:
they bind the forward thread to the last core of each NUMA node and poll in a thread
that never sleeps. Both are taken from them for the rounds, from outside, and the
output says so; so is, from all systems, the engine's polling for a second after each
message between its processes. --as-shipped adds a run of the base as it is.

The exit status is 0 only if every request of every system was answered, with the
answer of the single engine. Systems named "as shipped" do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / folder)
    for folder in (
        "tools",
        "examples/disaggregated/disaggregated_serving",
        "tests/v1/kv_connector/nixl_integration",
    )
)

import aiohttp

from bench_requests import TurnError, new_session
from compare_loads import (
    ANSWER_TOKENS,
    KINDS,
    Ask,
    Kind,
    Load,
    asks,
    saturation_rung,
    warm_up,
)
from compare_report import differing_answers, report
from compare_run import Result, load_results, run_load
from compare_stats import quantile
from compare_systems import (
    AS_SHIPPED,
    SINGLE,
    SYSTEMS,
    Fleet,
    Sources,
    System,
    SystemMismatch,
    fleet,
    prefer,
)
from compare_venv import BaseVenvError, base_venv
from fork_build.errors import BuildError
from fork_build.pins import REPOSITORY
from handoff_engines import engines_lock
from multiturn_engines import BENCH_SPEC
from multiturn_traffic import in_turn
from pd_processes import StartError

CALIBRATION = "calibration"
_REQUEST_TIMEOUT_S = 120.0
_SHIPPED_TIMEOUT_S = 40.0
_SHIPPED_SECONDS = 75.0


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        systems: that take turns.
        as_shipped: that run once, after the rounds.
        minutes: no round is begun that would not end by then.
    """

    systems: tuple[System, ...]
    as_shipped: tuple[System, ...]
    kinds: tuple[Kind, ...]
    rounds: int
    minutes: float
    seed: int
    nice: int
    output: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        return _run(options)
    except (TurnError, BaseVenvError, BuildError, StartError, SystemMismatch) as error:
        print(f"compare_base: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("results/compare_base"), metavar="FOLDER")
    add("--rounds", type=int, default=5, metavar="N")
    add(
        "--minutes",
        type=float,
        default=34.0,
        metavar="M",
        help="do not begin a round that would end later",
    )
    add("--seed", type=int, default=0)
    add(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="priority of engines and client; negative where others use the machine",
    )
    names = [system.name for system in SYSTEMS]
    add("--systems", nargs="+", choices=names, default=names)
    add("--kinds", nargs="+", choices=[k.name for k in KINDS])
    add(
        "--rungs",
        nargs="+",
        type=int,
        metavar="N",
        help="saturation rung of each kind, in order; default: measured first",
    )
    add(
        "--as-shipped",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the base's connectors once more, untouched",
    )
    add(
        "--quick",
        action="store_true",
        help="one round of few short prompts on our push alone: a check that all works",
    )
    add(
        "--ours",
        type=Path,
        default=REPOSITORY,
        metavar="FOLDER",
        help="serve the vllm in FOLDER, a copy, as ours; default: this checkout's",
    )
    add(
        "--report-only",
        action="store_true",
        help="make the table anew of the JSON files in FOLDER",
    )
    add("--log-dir", type=Path, help="kept there; default: temporary")
    add(
        "--no-lock",
        action="store_true",
        help="do not wait until no other test's engines run on this machine",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    if options.report_only:
        return _report(load_results(plan.output), plan.output)
    everything = (*plan.systems, *plan.as_shipped)
    needs_base = any(system.dialect == "base" for system in everything)
    base = base_venv() if needs_base else None
    if base is not None:
        print(
            f"base: {base.wheel.name} in {base.packages}, SHA-256 over its nixl "
            f"package {base.nixl_digest}",
            flush=True,
        )
    with contextlib.ExitStack() as stack:
        log_dir = options.log_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))
        )
        if not options.no_lock:
            stack.enter_context(engines_lock())
        if plan.nice:
            stack.enter_context(_preferred(plan.nice))
        sources = Sources(base, options.ours.resolve())
        comparison = Comparison(plan, sources, log_dir)
        if options.quick:
            loads = [Load(kind, 0) for kind in plan.kinds]
        else:
            loads = comparison.loads(options.rungs)
        comparison.rounds(loads)
        comparison.untouched(loads)
    return _report(comparison.results, plan.output)


@contextlib.contextmanager
def _preferred(nice: int) -> Iterator[None]:
    """Give this process, which times what it sends, the engines' priority."""
    prefer(os.getpid(), nice)
    try:
        yield
    finally:
        prefer(os.getpid(), 0)


def _plan(options: argparse.Namespace) -> Plan:
    chosen = tuple(k for k in KINDS if not options.kinds or k.name in options.kinds)
    systems = tuple(s for s in SYSTEMS if s.name in options.systems)
    shipped = AS_SHIPPED if options.as_shipped else ()
    rounds = options.rounds
    if options.quick:
        systems = tuple(s for s in SYSTEMS if s.name == "our-push")
        chosen, shipped, rounds = (replace(KINDS[0], light=4),), (), 1
    return Plan(
        systems,
        shipped,
        chosen,
        rounds,
        options.minutes,
        options.seed,
        options.nice,
        options.output,
    )


class Comparison:
    """Runs the systems of a plan and keeps their results.

    Args:
        sources: where the systems' code is.
        log_dir: for the engines' logs.
    """

    def __init__(self, plan: Plan, sources: Sources, log_dir: Path) -> None:
        self.plan = plan
        self.results: list[Result] = []
        self._sources = sources
        self._log_dir = log_dir
        self._began = time.monotonic()
        longest = max(max(kind.lengths) for kind in plan.kinds)
        self._room = longest + ANSWER_TOKENS + 1
        self._starts = 0

    def loads(self, rungs: Sequence[int] | None) -> list[Load]:
        """Light load and saturation point of each kind.

        The ladder is climbed on the single engine unless ``rungs`` names the places.
        """
        if rungs is not None:
            if len(rungs) != len(self.plan.kinds):
                raise TurnError(
                    f"--rungs names {len(rungs)}, expected one for each of "
                    f"{len(self.plan.kinds)} kinds"
                )
            places = dict(zip((k.name for k in self.plan.kinds), rungs, strict=True))
        else:
            places = asyncio.run(self._calibrate())
        found = []
        for kind in self.plan.kinds:
            found += [Load(kind, 0), Load(kind, places[kind.name], saturated=True)]
        return found

    async def _calibrate(self) -> dict[str, int]:
        places = {}
        with self._started(SINGLE) as running:
            async with new_session(_REQUEST_TIMEOUT_S) as session:
                await self._warm_up(session, running, -1)
                for kind in self.plan.kinds:
                    medians: dict[int, float] = {}
                    for rung in range(len(kind.ladder)):
                        load = Load(kind, rung)
                        sent = self._asks(load, CALIBRATION)
                        result = await run_load(session, running, load, sent, -1)
                        ttfts = [sample.ttft for sample in result.samples]
                        medians[rung] = statistics.median(ttfts)
                        print(
                            f"calibration, {kind.name} at {load.rate}/s: TTFT p50 "
                            f"{medians[rung] * 1000:.0f} ms",
                            flush=True,
                        )
                        if saturation_rung(medians) is not None:
                            break
                    place = saturation_rung(medians)
                    if place is None:
                        place = len(kind.ladder) - 1
                        print(
                            f"calibration: {kind.name} does not saturate on its "
                            "ladder; its last rung is taken",
                            flush=True,
                        )
                    places[kind.name] = place
        return places

    def rounds(self, loads: Sequence[Load]) -> None:
        """Run every system once in each round, as long as there is time."""
        longest = 0.0
        for number in range(self.plan.rounds):
            begun = time.monotonic()
            if begun - self._began + longest > self.plan.minutes * 60:
                print(
                    f"only {number} rounds: the next would end after "
                    f"{self.plan.minutes:g} minutes (--minutes)",
                    flush=True,
                )
                return
            for system in in_turn(self.plan.systems, number):
                asyncio.run(self._serve(system, loads, number))
            longest = max(longest, time.monotonic() - begun)

    def untouched(self, loads: Sequence[Load]) -> None:
        """Run the base as shipped under the light loads, once, if there is time."""
        for system in self.plan.as_shipped:
            left = self.plan.minutes * 60 - (time.monotonic() - self._began)
            if left < _SHIPPED_SECONDS:
                print(f"{system.name} is not run: there is no time left", flush=True)
                continue
            light = [load for load in loads if not load.saturated]
            try:
                asyncio.run(self._serve(system, light, 0))
            except (TurnError, StartError) as error:
                print(f"{system.name} does not run here: {error}", flush=True)

    async def _serve(self, system: System, loads: Sequence[Load], number: int) -> None:
        with self._started(system) as running:
            timeout = _SHIPPED_TIMEOUT_S if system.as_shipped else _REQUEST_TIMEOUT_S
            async with new_session(timeout) as session:
                await self._warm_up(session, running, number)
                for load in loads:
                    sent = self._asks(load, str(number))
                    result = await run_load(session, running, load, sent, number)
                    result.save(self.plan.output)
                    self.results.append(result)
                    _progress(result)
                    if system.as_shipped and result.errors:
                        return

    async def _warm_up(
        self, session: aiohttp.ClientSession, running: Fleet, number: int
    ) -> None:
        load = warm_up(self.plan.kinds)
        sent = self._asks(load, f"{running.system.name} {number}")
        for error in (await run_load(session, running, load, sent, number)).errors:
            print(f"    FAILED: warm-up, {error}", flush=True)

    @contextlib.contextmanager
    def _started(self, system: System) -> Iterator[Fleet]:
        self._starts += 1
        log_dir = self._log_dir / f"{self._starts:02d}-{system.name}"
        begun = time.monotonic()
        nice = self.plan.nice
        with fleet(system, self._sources, self._room, log_dir, nice) as running:
            seconds = time.monotonic() - begun
            print(f"{system.name} started in {seconds:.0f} s", flush=True)
            yield running

    def _asks(self, load: Load, part: str) -> list[Ask]:
        return asks(load, f"{self.plan.seed} {part}", BENCH_SPEC.vocab)


def _progress(result: Result) -> None:
    ttfts = [sample.ttft for sample in result.samples]
    handoffs = [s.handoff for s in result.samples if s.handoff is not None]
    text = f"round {result.round + 1}, {result.system}, {result.load}"
    if ttfts:
        text += f": TTFT p50 {quantile(ttfts, 0.5) * 1000:.0f} ms"
    if handoffs:
        text += f", hand-off {quantile(handoffs, 0.5) * 1000:.1f} ms"
    print(f"{text}, {result.seconds:.1f} s", flush=True)
    for error in result.errors:
        print(f"    FAILED: {error}", flush=True)


def _report(results: Sequence[Result], folder: Path) -> int:
    text = report(results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nJSON and table are in {folder}")
    counting = [r for r in results if r.system in {s.name for s in SYSTEMS}]
    failed = sum(len(result.errors) for result in counting)
    differing, compared = differing_answers(counting)
    print(f"{failed} requests failed; {differing} of {compared} answers differ")
    return 1 if failed or differing or not results else 0


if __name__ == "__main__":
    sys.exit(main())
