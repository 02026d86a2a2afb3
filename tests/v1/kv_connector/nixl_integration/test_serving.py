# SPDX-License-Identifier: Apache-2.0
"""Answers through a router are a single engine's, however they are asked for."""

from __future__ import annotations

import asyncio

import pytest

from handoff_client import (
    CHAT,
    MODEL,
    Client,
    handoffs,
    new_transfer_id,
    several,
    wait_handoff,
)
from handoff_workload import Ask, References, fresh, served, words
from pd_launcher import Mode, Pair
from tiny_model import as_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

AT_ONCE = 8


async def test_many_requests(
    client: Client, pair: Pair, references: References
) -> None:
    answers = await client.answers(pair.router, served(), AT_ONCE)

    assert references.problems(answers) == []


async def test_several_receivers(
    client: Client, pair: Pair, references: References
) -> None:
    before = {record["transfer_id"] for record in await handoffs(pair.prefill)}
    prompts = fresh("several")
    replies = await asyncio.gather(
        *(client.post(pair.router, several(Ask(p), 3)) for p in prompts)
    )

    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.choices == [references.expected(prompt)] * 3

    for record in await handoffs(pair.prefill):
        if record["transfer_id"] not in before:
            assert record["outcome"] == "served", record


async def test_several_receivers_without_router(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    (prompt, *_) = fresh("after")
    transfer_id = new_transfer_id()

    _, decode = await client.hand_off(
        pair, mode, several(Ask(prompt), 3), transfer_id, receivers=3
    )

    assert decode.choices == [references.expected(prompt)] * 3
    record = await wait_handoff(pair.prefill, transfer_id)
    assert record["outcome"] == "served"


async def test_chat_streamed_and_not(
    client: Client, pair: Pair, references: References
) -> None:
    for prompt in fresh("chat"):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": as_text(list(prompt))}],
            "max_tokens": 16,
            "temperature": 0,
        }

        whole = (await client.post(pair.router, body, CHAT)).chat_text
        streamed = await client.stream(pair.router, body, CHAT)

        assert words(whole) == references.expected(prompt)
        assert streamed == whole
