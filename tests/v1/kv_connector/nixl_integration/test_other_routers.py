# SPDX-License-Identifier: Apache-2.0
"""Engines that are driven as routers of other make drive them, leg by leg."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from field_routers import FIELD, Place, decode_params, filled
from handoff_client import (
    Body,
    Client,
    completion,
    handoffs,
    new_transfer_id,
    side_channel_address,
)
from handoff_workload import Ask, References, Tokens, fresh, words
from pd_launcher import Mode, Pair

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(300, func_only=True),
]


@pytest.mark.parametrize(
    ("mode", "name"),
    [(FIELD[n].mode, n) for n in FIELD if not FIELD[n].conversation],
)
async def test_the_answer_is_right(
    client: Client, pair: Pair, mode: Mode, references: References, name: str
) -> None:
    driven = [n for n in FIELD if FIELD[n].mode == mode].index(name)
    prompts = fresh("other_routers")[2 * driven : 2 * driven + 2]
    known = await _answered(client, pair)
    before = {record["request_id"] for record in await handoffs(pair.decode)}
    names = []
    for prompt, stream in zip(prompts, (False, True), strict=True):
        ask = Ask(prompt, stream=stream)
        answer, values = await _driven(client, pair, name, ask, known)
        assert answer == references.expected(prompt)
        named = "transfer_id" in FIELD[name].prefill
        unnamed = f"cmpl-{values[Place.REQUEST_ID]}-0"
        names.append(values[Place.TRANSFER_ID] if named else unnamed)
    records = [
        record
        for record in await handoffs(pair.decode)
        if record["request_id"] not in before
    ]
    assert [r["outcome"] for r in records] == ["received"] * 2, records
    assert [r["transfer_id"] for r in records] == names
    assert [r["tokens"] for r in records] == [len(prompt) for prompt in prompts]


async def _driven(
    client: Client, pair: Pair, name: str, ask: Ask, known: dict[str, Any]
) -> tuple[Tokens, dict[Place, str | int]]:
    """Both legs, as the router of this name sends them; what it chose, too.

    ``known`` is what it remembers of an earlier answer of the prefill engine.
    """
    router = FIELD[name]
    request_id = router.request_id.format(uuid=uuid.uuid4())
    host, port = side_channel_address(pair.prefill)
    values: dict[Place, str | int] = {
        Place.TRANSFER_ID: new_transfer_id("xfer-"),
        Place.REQUEST_ID: request_id,
        Place.ENGINE_ID: known["remote_engine_id"],
        Place.HOST: host,
        Place.PORT: port,
    }
    headers = {"X-Request-Id": request_id}
    body = completion(ask)
    first: Body = {
        **body,
        **router.capped,
        "kv_transfer_params": filled(router.prefill, values),
    }

    async def prefill() -> dict[str, Any]:
        reply = await client.post(pair.prefill, first, headers=headers)
        assert reply.status == 200, reply
        answered: dict[str, Any] = reply.body["kv_transfer_params"]
        return answered

    async def decode(answered: dict[str, Any]) -> Tokens:
        params = decode_params(router, answered, values)
        second = {**body, "kv_transfer_params": params}
        if ask.stream:
            return words(await client.stream(pair.decode, second, headers=headers))
        return (await client.post(pair.decode, second, headers=headers)).tokens

    if not router.together:
        return await decode(await prefill()), values
    _, answer = await asyncio.gather(prefill(), decode(known))
    found: Tokens = answer
    return found, values


async def _answered(client: Client, pair: Pair) -> dict[str, Any]:
    """What the prefill engine has answered to another request."""
    params = {"do_remote_decode": True, "transfer_id": new_transfer_id()}
    body = completion(Ask((7, 8, 9), 1), kv_transfer_params=params)
    prefill = await client.post(pair.prefill, body)
    told: dict[str, Any] = prefill.body["kv_transfer_params"]
    second = completion(Ask((7, 8, 9), 1), kv_transfer_params=told)
    assert (await client.post(pair.decode, second)).status == 200
    return told
