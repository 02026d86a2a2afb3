# SPDX-License-Identifier: Apache-2.0
"""An engine of two data-parallel ranks, each of which the router addresses."""

from __future__ import annotations

import asyncio
import random

import pytest

import kv_integrity
from handoff_client import (
    CLEAN_TIMEOUT_S,
    POLL_S,
    Client,
    assert_clean,
    completion,
    handoffs,
)
from handoff_engines import SPEC, EngineRoom
from handoff_workload import Ask
from pd_launcher import Engine, Mode
from pd_processes import LOOPBACK
from pd_router.legs import DP_RANK_HEADER
from tiny_model import random_prompt

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(400, func_only=True),
]

LENGTHS = (2, 33, 100, 513, 700, 900)


@pytest.mark.parametrize("divided", ["prefill", "decode"])
async def test_each_rank_hands_off(
    room: EngineRoom, client: Client, mode: Mode, divided: str
) -> None:
    names = {role: f"{mode}-{role}" for role in ("prefill", "decode")}
    names[divided] += "-dp-2"
    pair = room.pair(mode, names["prefill"], names["decode"])
    ranked, whole = pair.prefill, pair.decode
    given, taken = "served", "received"
    if divided == "decode":
        ranked, whole, given, taken = whole, ranked, taken, given
    rng = random.Random(f"data parallel {mode} {divided}")
    bodies = [
        completion(Ask(tuple(random_prompt(length, rng, SPEC)))) for length in LENGTHS
    ]

    got = [await client.post(pair.router, body) for body in bodies]
    # Apart from the blocks that the hand-off has left in the cache.
    alone = await asyncio.gather(
        *(client.post(whole, {**b, "cache_salt": "own"}) for b in bodies)
    )

    assert [g.tokens for g in got] == [a.tokens for a in alone]
    for rank, (_, port) in enumerate(ranked.ranks):
        await _assert_rank_clean(client, ranked, rank)
        records = await asyncio.to_thread(kv_integrity.handoffs, (LOOPBACK, port))
        # They take turns where they are equally busy.
        assert len(records) == len(LENGTHS) // 2
        assert {record["outcome"] for record in records} == {given}
    await assert_clean(client, pair)
    records = (await handoffs(whole))[-len(LENGTHS) :]
    assert [record["outcome"] for record in records] == [taken] * len(LENGTHS)


async def _assert_rank_clean(client: Client, engine: Engine, rank: int) -> None:
    _, port = engine.ranks[rank]
    nudge = completion(Ask((5,), 2))
    async with asyncio.timeout(CLEAN_TIMEOUT_S):
        while True:
            # A step lets go of blocks, and tells the tables' sizes.
            await client.post(engine, nudge, headers={DP_RANK_HEADER: str(rank)})
            state = await asyncio.to_thread(kv_integrity.integrity, (LOOPBACK, port))
            if state["free_blocks"] == state["total_blocks"] and not any(
                state["tables"].values()
            ):
                return
            await asyncio.sleep(POLL_S)
