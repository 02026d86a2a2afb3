# SPDX-License-Identifier: Apache-2.0
"""Engines of different block sizes refuse each other, and say why."""

from __future__ import annotations

import pytest

from handoff_client import Client, assert_clean, completion
from handoff_engines import BLOCK_SIZE, OTHER_BLOCK_SIZE, EngineRoom
from handoff_workload import Ask, References, fresh

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


async def test_block_sizes(
    room: EngineRoom, references: References, client: Client
) -> None:
    # The noisy engine spoils nothing here; it runs since the tests before this one.
    pair = room.pair("pull", "pull-prefill-noisy", "pull-decode-otherblocks")
    prompt = fresh("foreign")[0]

    reply = await client.post(pair.router, completion(Ask(prompt)))

    assert reply.status == 503, reply
    log = pair.decode.log_path.read_text()
    differs = f"block_size differs (local {OTHER_BLOCK_SIZE}, remote {BLOCK_SIZE})"
    assert differs in log
    assert (await client.answer(pair.decode, Ask(prompt))) == references.expected(
        prompt
    )
    await assert_clean(client, pair)
