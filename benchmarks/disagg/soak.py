# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic over push and pull for a long time, with random aborts and faults.

    python benchmarks/disagg/soak.py --duration 1200

Half of the duration goes to each mode; starting engines is not part of it. The
last line counts what happened. The exit status is 0 only if no answer was wrong, no
request was lost or hung, nothing leaked, no engine ended by itself, all requests
that no fault touched succeeded, every kind of fault happened, and there were
enough of both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / folder)
    for folder in (
        "benchmarks/disagg",
        "tools",
        "examples/disaggregated/disaggregated_serving",
        "tests/v1/kv_connector/nixl_integration",
    )
)

import aiohttp

from fault_engines import FaultPair, Policy, Side
from fault_requests import (
    ABORTED,
    NO_ANSWER,
    HandOff,
    Outcome,
    Requests,
    clean,
    make_references,
    wrong,
)
from fault_rules import Plan, Rule
from handoff_client import integrity
from handoff_engines import SPEC, engines_lock
from handoff_workload import Ask, References
from soak_tally import ABORTS, MAY_FAIL, MODES, OF_ENGINES, Tally, request_faults
from tiny_model import random_prompt

AT_ONCE = 5
PROMPTS = 48
LONGEST_PROMPT = 1500
ANSWER_TOKENS = (1, 8, 24)
CONVERSATIONS = 16
TALK_SHARE = 0.25
"""Share of the requests that begin a conversation of two turns."""
FAULT_SHARE = 0.35
"""Share of the requests that get a fault of their own."""
HUNG_S = 60.0
PAUSE_S = (4.0, 9.0)
"""Between two faults of a whole engine."""
FAULT_S = (0.3, 7.0)


class Half:
    """The traffic of one mode, and what disturbs it."""

    def __init__(
        self,
        pair: FaultPair,
        requests: Requests,
        references: References,
        asks: list[Ask],
        talks: list[tuple[Ask, Ask]],
        tally: Tally,
        rng: random.Random,
    ) -> None:
        self._pair = pair
        self._requests = requests
        self._references = references
        self._asks = asks
        self._talks = talks
        self._tally = tally
        self._rng = rng
        self._faults = request_faults(pair.mode)
        self._due = list(self._faults)
        self._disturbed: list[list[float]] = []
        self._open = asyncio.Event()
        self._stop = False
        self._under_way = 0

    async def run(self, seconds: float) -> None:
        """Traffic for so long, not counting the time without one of the engines."""
        self._arm()
        self._open.set()
        workers = [asyncio.create_task(self._work()) for _ in range(AT_ONCE)]
        await self._disturb(seconds)
        self._stop = True
        await asyncio.gather(*workers)
        await self._settled()

    # ---- traffic

    async def _work(self) -> None:
        while not self._stop:
            await self._open.wait()
            self._under_way += 1
            try:
                await self._one()
            finally:
                self._under_way -= 1
            await asyncio.sleep(self._rng.uniform(0, 0.1))

    async def _one(self) -> None:
        if self._rng.random() >= TALK_SHARE:
            await self._turn(self._rng.choice(self._asks), None)
            return
        first, second = self._rng.choice(self._talks)
        earlier = await self._turn(first, None)
        if earlier is not None and not self._stop:
            await self._turn(second, earlier)

    async def _turn(self, ask: Ask, earlier: str | None) -> str | None:
        """One request; returns its ``transfer_id`` if it was answered."""
        ask = replace(ask, stream=self._rng.random() < 0.3)
        fault = self._choose()
        name = fault or "plain"
        hand_off = HandOff(self._requests, self._pair, name, ask, earlier)
        started = time.monotonic()
        self._tally.requests += 1
        work = asyncio.create_task(hand_off.run())
        if fault in ABORTS:
            await self._hang_up(hand_off, work, fault)
        done, _ = await asyncio.wait({work}, timeout=HUNG_S)
        if not done:
            self._tally.hung += 1
            self._tally.note(f"{hand_off.transfer_id} hangs")
            work.cancel()
            return None
        disturbed = self._was_disturbed(started, time.monotonic())
        self._judge(hand_off, work.result(), fault, disturbed)
        if work.result().status == NO_ANSWER:
            # Its engine is dead; asking without pause would not bring it back.
            await asyncio.sleep(0.5)
        return hand_off.transfer_id if work.result().status == 200 else None

    def _choose(self) -> str | None:
        if self._rng.random() >= FAULT_SHARE:
            return None
        # In turn, so that none is missing however short the run is.
        if not self._due:
            self._due = list(self._faults)
            self._rng.shuffle(self._due)
        return self._due.pop()

    async def _hang_up(
        self, hand_off: HandOff, work: asyncio.Task[Outcome], fault: str
    ) -> None:
        await asyncio.wait({work}, timeout=self._rng.uniform(0.0, 0.6))
        task = hand_off.prefill if fault == "abort_prefill" else hand_off.decode
        if task is not None and not task.done():
            task.cancel()
            self._tally.faults[fault] += 1

    def _judge(
        self, hand_off: HandOff, outcome: Outcome, fault: str | None, disturbed: bool
    ) -> None:
        tally, name = self._tally, hand_off.transfer_id
        problem = wrong(self._references, hand_off.ask, outcome)
        if problem is not None:
            tally.wrong += 1
            tally.note(f"{name}: {problem}")
        if outcome.status == NO_ANSWER and not disturbed:
            tally.lost += 1
            tally.note(f"{name}: {outcome}")
        if fault is None and not disturbed:
            tally.untouched += 1
            tally.untouched_ok += outcome.status == 200
            if outcome.status != 200:
                tally.note(f"{name}: {outcome}")
        survives = fault is not None and fault not in MAY_FAIL and not disturbed
        if outcome.status not in (200, 500, NO_ANSWER, ABORTED) or (
            survives and outcome.status == 500
        ):
            tally.lost += 1
            tally.note(f"{name}: {outcome}")

    def _was_disturbed(self, start: float, end: float) -> bool:
        return any(begin <= end and start <= until for begin, until in self._disturbed)

    # ---- faults of whole engines

    async def _disturb(self, seconds: float) -> None:
        kinds = [*OF_ENGINES]
        remaining = seconds
        sides: dict[str, Side] = dict.fromkeys(kinds, "P")
        while remaining > 0:
            pause = min(remaining, self._rng.uniform(*PAUSE_S))
            began = time.monotonic()
            await asyncio.sleep(pause)
            kind = kinds.pop(0)
            kinds.append(kind)
            side = sides[kind]
            sides[kind] = "D" if side == "P" else "P"
            away = 0.0
            self._tally.faults[kind] += 1
            print(f"   {self._pair.mode}: {kind} {side}", flush=True)
            async with self._disturbance():
                if kind == "kill":
                    away = await self._kill(side)
                elif kind == "stop":
                    await self._stopped(side)
                else:
                    self._arm(cut=side)
                    await asyncio.sleep(self._rng.uniform(*FAULT_S))
                    self._arm()
            self._count_deaths()
            remaining -= time.monotonic() - began - away

    @contextlib.asynccontextmanager
    async def _disturbance(self) -> AsyncIterator[None]:
        window = [time.monotonic(), math.inf]
        self._disturbed.append(window)
        try:
            yield
        finally:
            window[1] = time.monotonic()

    async def _stopped(self, side: Side) -> None:
        self._pair.signal(side, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*FAULT_S))
        finally:
            self._pair.signal(side, signal.SIGCONT)

    async def _kill(self, side: Side) -> float:
        """Replace an engine; returns the seconds without traffic."""
        pair = self._pair
        pair.kill(side)
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        self._open.clear()
        deadline = time.monotonic() + HUNG_S
        while self._under_way and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        began = time.monotonic()
        await self._holds_nothing("D" if side == "P" else "P")
        await asyncio.to_thread(pair.reap, side)
        if self._rng.random() < 0.5:
            pair.engine_ids[side] += "+"
        pair.policy = self._rng.choice(POLICIES)
        await asyncio.to_thread(pair.start, side)
        self._arm()
        self._open.set()
        return time.monotonic() - began

    def _arm(self, cut: Side | None = None) -> None:
        rules = {
            name: Rule(
                rule.on, rule.do, rule.kind, f"{name}.", rule.count, rule.seconds
            )
            for name, rule in self._faults.items()
            if rule is not None
        }
        for side in SIDES:
            self._pair.control(side).apply(Plan(rules, cut=side == cut, trace=False))

    # ---- what is left

    def _count_faults(self) -> None:
        """Count the faults of single hand-offs that the engines made."""
        made = {
            event.transfer
            for side in SIDES
            for event in self._pair.control(side).events()
            if event.fault and event.fault != "cut"
        }
        for transfer in made:
            fault = transfer.partition(".")[0]
            if fault in self._faults:
                self._tally.faults[fault] += 1

    async def _settled(self) -> None:
        for side in SIDES:
            self._pair.control(side).clear()
        for side in SIDES:
            await self._holds_nothing(side)
        self._count_deaths()
        self._count_faults()
        counters = (await integrity(self._pair.prefill))["counters"]
        self._tally.reads += counters.get("reader_read", 0)
        print(f"   {self._pair.mode}: {counters}", flush=True)

    async def _holds_nothing(self, side: Side) -> None:
        held = await clean(self._requests, self._pair.engine(side))
        if held:
            self._tally.leaked += 1
            self._tally.note(held)

    def _count_deaths(self) -> None:
        for side in SIDES:
            engine = self._pair.engine(side)
            if not engine.running:
                self._tally.engine_deaths += 1
                self._tally.note(f"{engine.name} ended with {engine.returncode}")


SIDES: tuple[Side, ...] = ("P", "D")
POLICIES: tuple[Policy, ...] = ("fail", "recompute")


def workload(rng: random.Random) -> list[Ask]:
    """Prompts of all lengths."""
    lengths = [
        round(math.exp(rng.uniform(0, math.log(LONGEST_PROMPT))))
        for _ in range(PROMPTS)
    ]
    return [
        Ask(tuple(random_prompt(length, rng, SPEC)), rng.choice(ANSWER_TOKENS))
        for length in lengths
    ]


def talks(
    asks: list[Ask], references: References, rng: random.Random
) -> list[tuple[Ask, Ask]]:
    """Conversations of two turns; the second repeats the first and its answer."""
    found = []
    for ask in rng.sample(asks, CONVERSATIONS):
        history = ask.prompt + references.expected(ask.prompt, ask.max_tokens)
        more = tuple(random_prompt(rng.randint(1, 200), rng, SPEC))
        found.append((ask, Ask(history + more, rng.choice(ANSWER_TOKENS))))
    return found


async def soak(duration: float, seed: int, log_dir: Path) -> Tally:
    """Run both halves."""
    tally, rng = Tally(), random.Random(seed)
    asks = workload(rng)
    made: tuple[References, list[tuple[Ask, Ask]]] | None = None
    timeout = aiohttp.ClientTimeout(total=HUNG_S * 2)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        requests = Requests(session)
        for mode in MODES:
            pair = FaultPair(mode, rng.choice(POLICIES), log_dir, keeping=True)
            try:
                await asyncio.to_thread(pair.start, *SIDES)
                if made is None:
                    made = await _prepare(requests, pair, asks, rng)
                references, conversations = made
                half = Half(pair, requests, references, asks, conversations, tally, rng)
                await half.run(duration / len(MODES))
            finally:
                await asyncio.to_thread(pair.close)
            print(tally.line(), flush=True)
    return tally


async def _prepare(
    requests: Requests, pair: FaultPair, asks: list[Ask], rng: random.Random
) -> tuple[References, list[tuple[Ask, Ask]]]:
    """Right answers to everything, and the conversations."""
    references = await make_references(requests, pair.decode, asks)
    conversations = talks(asks, references, rng)
    later = [second for _, second in conversations]
    more = await make_references(requests, pair.decode, later)
    references.answers.update(more.answers)
    return references, conversations


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--duration", type=float, default=1200.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-dir", type=Path, help="kept there; default: temporary")
    parser.add_argument(
        "--no-lock",
        action="store_true",
        help="do not wait until no other test's engines run on this machine",
    )
    options = parser.parse_args()
    if options.duration <= 0:
        parser.error(f"--duration is {options.duration}, expected more than 0 seconds")
    with contextlib.ExitStack() as stack:
        log_dir = options.log_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))
        )
        if not options.no_lock:
            stack.enter_context(engines_lock())
        print(f"seed {options.seed}, logs in {log_dir}", flush=True)
        tally = asyncio.run(soak(options.duration, options.seed, log_dir))
    shortcomings = tally.shortcomings(options.duration)
    for shortcoming in shortcomings:
        print(f"failed: {shortcoming}")
    print(tally.line())
    return 1 if shortcomings else 0


if __name__ == "__main__":
    sys.exit(main())
