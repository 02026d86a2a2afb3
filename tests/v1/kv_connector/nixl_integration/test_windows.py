# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows: every group of layers has a block table of its own.

The prefill engine alone is the reference for the pair.
"""

from __future__ import annotations

import random

import pytest

from handoff_client import Client, assert_clean, completion, handoffs
from handoff_engines import BLOCK_BYTES, BLOCK_SIZE, SPEC, WINDOW_SPEC, EngineRoom
from handoff_turns import Talk, forget, reading, take_turn
from handoff_workload import Ask
from modes import PULL_IN_FULL
from pd_launcher import Mode
from tiny_model import random_prompt

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

LENGTHS = (2, 31, 33, 99, 101, 150, 512, 513, 900, 1500)


@PULL_IN_FULL
async def test_answers_and_bytes(room: EngineRoom, client: Client, mode: Mode) -> None:
    names = f"{mode}-prefill-windows", f"{mode}-decode-windows"
    pair = room.pair(mode, *names)
    for length in LENGTHS:
        prompt = random_prompt(length, random.Random(f"windows {length}"), SPEC)
        body = completion(Ask(tuple(prompt)))

        got = await client.post(pair.router, body)
        alone = await client.post(pair.prefill, body)

        assert got.tokens == alone.tokens
        record = (await handoffs(pair.decode))[-1]
        assert record["outcome"] == "received"
        assert record["bytes"] == _moved(length)
    await assert_clean(client, pair)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["push"])
async def test_kept_turns_are_read_back(
    room: EngineRoom, client: Client, mode: Mode
) -> None:
    """From the end of what is kept, and from no other place."""
    names = f"{mode}-prefill-turns-windows", f"{mode}-decode-turns-windows"
    pair = room.pair(mode, *names)
    rng = random.Random("windows turns")
    talk, before = Talk(), 0
    history = tuple(random_prompt(300, rng, SPEC))
    for more in (0, 70, 150):
        history += tuple(random_prompt(more, rng, SPEC))
        answer = await take_turn(client, pair, mode, talk, history)
        # It caches nothing, and so computes all of it.
        alone = await client.post(pair.prefill, completion(Ask(history)))
        assert answer == alone.tokens
        known = len(history) + len(answer) - 1
        if more:
            read = await reading(pair, talk.turns[-2])
            assert (read["outcome"], read["tokens"]) == ("read", before)
            assert read["bytes"] == _moved(before)
        before, history = known, history + answer

    # The whole beginning is the same, and the window before its end is not kept.
    edited = (*history[: before - 40], *random_prompt(60, rng, SPEC))
    answer = await take_turn(client, pair, mode, talk, edited)
    alone = await client.post(pair.prefill, completion(Ask(edited)))
    assert answer == alone.tokens
    assert (await reading(pair, talk.turns[-2]))["outcome"] == "missed"
    await forget(client, pair.decode)
    await assert_clean(client, pair)


def _moved(length: int) -> int:
    """Of half of the layers all blocks, of the others those in the window."""
    blocks = -(-length // BLOCK_SIZE)
    skipped = max(0, length - WINDOW_SPEC.window + 1) // BLOCK_SIZE
    return BLOCK_BYTES // 2 * (blocks + blocks - skipped)
