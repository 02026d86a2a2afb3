# SPDX-License-Identifier: Apache-2.0
"""Engines of different block sizes hand KV to each other, by position."""

from __future__ import annotations

import random

import pytest

from handoff_client import Client, assert_clean, completion, handoffs
from handoff_engines import SPEC, EngineRoom
from handoff_workload import Ask
from pd_launcher import Mode
from tiny_model import random_prompt

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

LENGTHS = (2, 31, 32, 33, 63, 64, 65, 97, 300, 511, 512, 513, 1000)
SHARED = 96
"""Tokens that the decode engine has in its cache before: no multiple of both sizes."""


@pytest.mark.full
@pytest.mark.parametrize("larger", ["prefill", "decode"])
async def test_block_sizes(
    room: EngineRoom, client: Client, mode: Mode, larger: str
) -> None:
    names = [
        f"{mode}-{role}" + ("-otherblocks" if role == larger else "")
        for role in ("prefill", "decode")
    ]
    pair = room.pair(mode, *names)
    rng = random.Random(f"block sizes {mode} {larger}")
    shared = random_prompt(SHARED, rng, SPEC)
    prompts = [random_prompt(length, rng, SPEC) for length in LENGTHS]
    prompts += [shared, shared + random_prompt(200, rng, SPEC)]
    for prompt in prompts:
        body = completion(Ask(tuple(prompt)))

        got = await client.post(pair.router, body)
        # Apart from the blocks that the hand-off has left in the cache.
        alone = await client.post(pair.prefill, {**body, "cache_salt": "reference"})

        assert got.tokens == alone.tokens
        record = (await handoffs(pair.decode))[-1]
        assert record["outcome"] == "received"
    await assert_clean(client, pair)
