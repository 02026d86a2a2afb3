# SPDX-License-Identifier: Apache-2.0
"""What routers of other make send, and what no router should send."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from handoff_client import (
    Client,
    completion,
    decode_params,
    handoffs,
    integrity,
    new_transfer_id,
    prefill_params,
)
from handoff_engines import side_channel_params
from handoff_workload import Ask, References, fresh
from pd_launcher import Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


async def test_router_without_transfer_id(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    first_params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    second_params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_block_ids": None,
        **side_channel_params(pair.prefill),
    }
    before = {record["request_id"] for record in await handoffs(pair.decode)}
    for prompt in fresh("plain_router"):
        headers = {"X-Request-Id": new_transfer_id()}
        body = completion(Ask(prompt))
        first = {**body, "max_tokens": 1, "kv_transfer_params": first_params}
        if mode == "push":
            second = {**body, "kv_transfer_params": second_params}
            prefill, decode = await asyncio.gather(
                client.post(pair.prefill, first, headers=headers),
                client.post(pair.decode, second, headers=headers),
            )
        else:
            prefill = await client.post(pair.prefill, first, headers=headers)
            relayed = dict(prefill.body["kv_transfer_params"])
            del relayed["transfer_id"]
            second = {**body, "kv_transfer_params": relayed}
            decode = await client.post(pair.decode, second, headers=headers)

        assert prefill.tokens == references.expected(prompt, 1)
        assert decode.tokens == references.expected(prompt)

    records = [
        record
        for record in await handoffs(pair.decode)
        if record["request_id"] not in before
    ]
    assert [r["outcome"] for r in records] == ["received"] * 3, records
    assert [r["tokens"] for r in records] == [len(p) for p in fresh("plain_router")]


INVALID: dict[str, dict[str, Any]] = {
    "empty": {},
    "both legs": {"do_remote_decode": True, "do_remote_prefill": True},
    "flag is a text": {"do_remote_prefill": "yes"},
    "flag is a number": {"do_remote_decode": 1},
    "no address": {"do_remote_prefill": True, "transfer_id": "t-no-address"},
    "port is a text": {"do_remote_prefill": True, "remote_port": "5600"},
    "port is too large": {"do_remote_prefill": True, "remote_port": 1 << 40},
    "host is a list": {"do_remote_prefill": True, "remote_host": ["127.0.0.1"]},
    "id is a dict": {"do_remote_decode": True, "transfer_id": {"a": 1}},
    "id is empty": {"do_remote_decode": True, "transfer_id": ""},
    "id is endless": {"do_remote_decode": True, "transfer_id": "x" * 100_000},
    "no receivers": {"do_remote_decode": True, "num_receivers": 0},
    "receivers is a flag": {"do_remote_decode": True, "num_receivers": True},
    "size is negative": {"do_remote_prefill": True, "tp_size": -1},
    "foreign keys": {"speed": "high", "nested": {"deep": [1, 2, {"x": None}]}},
}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_invalid_params(
    client: Client, pair: Pair, references: References, leg: str
) -> None:
    engine = pair.prefill if leg == "prefill" else pair.decode
    problems: list[str] = []
    for prompt, (name, wrong) in zip(fresh("invalid"), INVALID.items(), strict=False):
        params = dict(wrong)
        if params.get("do_remote_prefill") and name != "no address":
            params = {**side_channel_params(pair.prefill), **params}

        body = completion(Ask(prompt), kv_transfer_params=params)
        reply = await client.post(engine, body)

        # What cannot be used is ignored: the prompt is computed here.
        if reply.status != 200 or reply.tokens != references.expected(prompt):
            problems.append(f"{name}: {reply}")
    assert problems == []
    counters = (await integrity(engine))["counters"]
    assert counters["invalid_params"] >= len(INVALID) - 2


async def test_unreachable_prefill(
    client: Client, pair: Pair, references: References
) -> None:
    """Nobody listens there: the request fails soon, and nothing else does."""
    prompt = fresh("invalid")[-1]
    params = {**decode_params(new_transfer_id(), pair.prefill), "remote_port": 1}

    reply = await client.post(
        pair.decode, completion(Ask(prompt), kv_transfer_params=params)
    )

    assert reply.status == 500, reply
    local = await client.post(pair.decode, completion(Ask(prompt)))
    assert local.tokens == references.expected(prompt)


async def test_legs_of_different_prompts(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    """KV of another prompt is never taken for this one's."""
    one, other = fresh("invalid")[-3], fresh("invalid")[-2]
    transfer_id = new_transfer_id()
    body = completion(Ask(one), max_tokens=1)
    first = {**body, "kv_transfer_params": prefill_params(transfer_id)}
    params = decode_params(transfer_id, pair.prefill)
    second = completion(Ask(other), kv_transfer_params=params)

    prefill, decode = await asyncio.gather(
        client.post(pair.prefill, first), client.post(pair.decode, second)
    )

    assert prefill.tokens == references.expected(one, 1)
    assert decode.status == 500, decode
