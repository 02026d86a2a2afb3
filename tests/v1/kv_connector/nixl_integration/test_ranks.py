# SPDX-License-Identifier: Apache-2.0
"""Engines of several worker ranks hand KV to engines of as many, more or fewer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from handoff_client import (
    NUDGE_EVERY_S,
    Client,
    assert_clean,
    completion,
    integrity,
    new_transfer_id,
    several,
    wait_handoff,
)
from handoff_engines import BLOCK_BYTES, BLOCK_SIZE, EngineRoom
from handoff_turns import Talk, forget, reading, take_turn
from handoff_workload import (
    Ask,
    References,
    Tokens,
    answers_without_engine,
    ranks_prompts,
)
from pd_launcher import Engine, Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400, func_only=True)]

LONG = pytest.mark.full
SIZES = [
    pytest.param("push", "", "-tp-2", id="push-1-2"),
    pytest.param("pull", "-tp-2", "", id="pull-2-1", marks=LONG),
    pytest.param("push", "-tp-2", "", id="push-2-1", marks=LONG),
    pytest.param("pull", "", "-tp-2", id="pull-1-2", marks=LONG),
    pytest.param("push", "-tp-2", "-tp-2", id="push-2-2", marks=LONG),
    pytest.param("pull", "-tp-2", "-tp-2", id="pull-2-2", marks=LONG),
    pytest.param("push", "-pp-2", "", id="push-pipeline", marks=LONG),
    pytest.param("pull", "-pp-2", "", id="pull-pipeline", marks=LONG),
]


async def _hand_off(
    client: Client, pair: Pair, mode: Mode, prompt: Tokens
) -> tuple[Ask, Tokens]:
    transfer_id = new_transfer_id()
    ask = Ask(prompt)
    _, decode = await client.hand_off(pair, mode, completion(ask), transfer_id)
    taken = await _record(client, pair.decode, transfer_id)
    given = await _record(client, pair.prefill, transfer_id)
    outcomes, tokens = ("served", "received"), len(prompt)
    if len(prompt) == 1:
        # Every decode rank says so, and counts for its part of one receiver.
        outcomes, tokens = ("released", "not_needed"), 0
    blocks = -(-tokens // BLOCK_SIZE)
    assert (given["outcome"], taken["outcome"]) == outcomes, (given, taken)
    assert given["tokens"] == taken["tokens"] == tokens, (given, taken)
    # All heads of all layers, each once, over all ranks.
    assert taken["bytes"] == blocks * BLOCK_BYTES, taken
    return ask, decode.tokens


async def _record(client: Client, engine: Engine, transfer_id: str) -> dict[str, Any]:
    """What became of it; an engine that sleeps meanwhile hears of it by a request."""
    waiting = asyncio.create_task(wait_handoff(engine, transfer_id))
    while not (await asyncio.wait([waiting], timeout=NUDGE_EVERY_S))[0]:
        await client.nudge(engine)
    return await waiting


async def _ranks(engine: Engine) -> set[str]:
    tables = (await integrity(engine))["tables"]
    return {name.split("_")[0] for name in tables if name.startswith("rank")}


@pytest.mark.parametrize(("mode", "prefill", "decode"), SIZES)
async def test_sizes(
    room: EngineRoom,
    client: Client,
    mode: Mode,
    prefill: str,
    decode: str,
) -> None:
    prompts = ranks_prompts(f"{mode} {prefill} {decode}")
    # The sums of ranks differ from the model's own by rounding only.
    answers = References(answers_without_engine(prompts))
    pair = room.pair(mode, f"{mode}-prefill{prefill}", f"{mode}-decode{decode}")

    got = [await _hand_off(client, pair, mode, prompt) for prompt in prompts]
    # All at a time, the prefixes cached; through the router.
    again = await client.answers(pair.router, [ask for ask, _ in got], len(got))
    (*_, longest) = prompts
    reply = await client.post(pair.router, several(Ask(longest), 2))

    assert answers.problems([*got, *again]) == []
    assert answers.problems((Ask(longest), one) for one in reply.choices) == []
    for engine, size in ((pair.prefill, prefill), (pair.decode, decode)):
        assert len(await _ranks(engine)) == (2 if size else 1)
    await assert_clean(client, pair)

    leaving = asyncio.create_task(client.post(pair.router, completion(Ask(longest))))
    await asyncio.sleep(0.2)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    await assert_clean(client, pair)


@LONG
@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [
        ("push", "-tp-2", ""),
        ("pull", "", "-tp-2"),
        ("push", "-pp-2", ""),
        ("push", "-otherblocks", ""),
        ("pull", "", "-otherblocks"),
    ],
)
async def test_kept_turns_are_read_back(
    room: EngineRoom,
    client: Client,
    mode: Mode,
    prefill: str,
    decode: str,
) -> None:
    pair = room.pair(
        mode, f"{mode}-prefill-turns{prefill}", f"{mode}-decode-turns{decode}"
    )
    talk, answers = Talk(), References({})
    prompt = next(p for p in ranks_prompts(pair.prefill.name) if len(p) == 600)
    history = prompt
    for more in (0, 70, 90):
        history += prompt[:more]
        answer = await take_turn(client, pair, mode, talk, history)
        answers.answers |= answers_without_engine([history])
        assert answers.problems([(Ask(history), answer)]) == []
        history += answer
    for turn in talk.turns[:-1]:
        read = await reading(pair, turn)
        assert read["outcome"] == "read", read
        assert read["bytes"] >= read["tokens"] // BLOCK_SIZE * BLOCK_BYTES, read
    await forget(client, pair.decode)
    await assert_clean(client, pair)
