# SPDX-License-Identifier: Apache-2.0
"""A prefill engine of two data-parallel ranks, each of which the router addresses."""

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


async def test_each_rank_hands_off(
    room: EngineRoom, client: Client, mode: Mode
) -> None:
    pair = room.pair(mode, f"{mode}-prefill-dp-2", f"{mode}-decode")
    rng = random.Random(f"data parallel {mode}")
    bodies = [
        completion(Ask(tuple(random_prompt(length, rng, SPEC)))) for length in LENGTHS
    ]

    got = [await client.post(pair.router, body) for body in bodies]
    # Apart from the blocks that the hand-off has left in the cache.
    alone = await asyncio.gather(
        *(client.post(pair.decode, {**b, "cache_salt": "own"}) for b in bodies)
    )

    assert [g.tokens for g in got] == [a.tokens for a in alone]
    taken = (await handoffs(pair.decode))[-len(LENGTHS) :]
    assert [record["outcome"] for record in taken] == ["received"] * len(LENGTHS)
    for rank, (_, port) in enumerate(pair.prefill.ranks):
        await _assert_rank_clean(client, pair.prefill, rank)
        given = await asyncio.to_thread(kv_integrity.handoffs, (LOOPBACK, port))
        # They take turns where they are equally busy.
        assert len(given) == len(LENGTHS) // 2
        assert {record["outcome"] for record in given} == {"served"}
    await assert_clean(client, pair)


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
