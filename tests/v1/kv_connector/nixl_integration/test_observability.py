# SPDX-License-Identifier: Apache-2.0
"""Two engines tell where the time of their hand-offs went, and agree about it."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

import handoff_timeline
from handoff_client import (
    CLEAN_TIMEOUT_S,
    POLL_S,
    Client,
    assert_clean,
    completion,
    new_transfer_id,
    wait_handoff,
)
from handoff_engines import SPEC, EngineRoom
from handoff_timeline import Handoff
from handoff_workload import Ask
from pd_launcher import Engine, Mode
from tiny_model import random_prompt

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

LENGTHS = (40, 700, 1500)
WAITS = ("waiting_for_compute", "waiting_for_coordination", "transfer")
P_PHASES = ("queue", "prefill", "claim", "post", "transfer", "release")
D_PHASES = ("queue", "connect", "answer", "prefill_wait", "transfer", "resume")


class Durations:
    """What an engine's histograms have gained since this was made."""

    def __init__(self, client: Client, engine: Engine, before: dict[str, float]):
        self._client = client
        self._engine = engine
        self._before = before
        self._now = before

    @classmethod
    async def of(cls, client: Client, engine: Engine) -> Durations:
        return cls(client, engine, await client.metrics(engine))

    async def wait(self, count: int) -> None:
        """Metrics follow an engine's steps."""
        deadline = time.monotonic() + CLEAN_TIMEOUT_S
        while self.count("total") < count and time.monotonic() < deadline:
            await self._client.nudge(self._engine)
            await asyncio.sleep(POLL_S)
            self._now = await self._client.metrics(self._engine)

    def count(self, name: str) -> float:
        return self._gained(f"{name}_seconds_count")

    def seconds(self, name: str) -> float:
        return self._gained(f"{name}_seconds_sum")

    def _gained(self, name: str) -> float:
        full = f"vllm:nixl_handoff_{name}"
        return self._now.get(full, 0.0) - self._before.get(full, 0.0)


async def _traced(trace: Path, names: list[str]) -> list[Handoff]:
    """Both sides of each hand-off; lines follow the records by a moment."""
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        sides, strange = handoff_timeline.read([trace])
        assert strange == 0
        found = [h for h in handoff_timeline.join(sides) if h.transfer_id in names]
        sides_there = sum(len(handoff.sides) for handoff in found)
        if sides_there >= 2 * len(names) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(POLL_S)


async def test_where_the_time_goes(
    client: Client, room: EngineRoom, mode: Mode, tmp_path: Path
) -> None:
    pair = room.pair(mode, f"{mode}-prefill", f"{mode}-decode")
    p, d = (
        await Durations.of(client, pair.prefill),
        await Durations.of(client, pair.decode),
    )
    names = []
    for length in LENGTHS:
        prompt = tuple(random_prompt(length, random.Random(f"time{length}"), SPEC))
        names.append(new_transfer_id())
        await client.hand_off(pair, mode, completion(Ask(prompt)), names[-1])
        for engine in (pair.decode, pair.prefill):
            record = await wait_handoff(engine, names[-1])
            assert record["outcome"] in ("served", "received"), record
            assert record["phases"], record

    for side, phases in ((p, P_PHASES), (d, D_PHASES)):
        await side.wait(len(LENGTHS))
        assert {name: side.count(name) for name in (*phases, *WAITS, "total")} == (
            dict.fromkeys((*phases, *WAITS, "total"), len(LENGTHS))
        )
        total = side.seconds("total")
        assert sum(side.seconds(name) for name in phases) == pytest.approx(total)
        assert sum(side.seconds(name) for name in WAITS) == pytest.approx(total)
    assert p.seconds("prefill") > 0
    if mode == "pull":
        # All is computed before D asks.
        assert d.seconds("prefill_wait") == 0

    handoffs = await _traced(room.trace, names)
    assert [handoff.transfer_id for handoff in handoffs] == names
    for handoff in handoffs:
        assert [side.role for side in handoff.sides] == ["sender", "receiver"]
        assert [tuple(name for name, *_ in side.phases) for side in handoff.sides] == [
            P_PHASES,
            D_PHASES,
        ]
        assert handoff.own_seconds is not None
        assert handoff.own_seconds > 0
    # Both read the same clocks. A millisecond allows for the two calls that read
    # the monotonic clock and the time of day.
    assert handoff_timeline.clock_error(handoffs) < 0.001

    picture = tmp_path / "handoffs.png"
    assert handoff_timeline.main([str(room.trace), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    await assert_clean(client, pair)
