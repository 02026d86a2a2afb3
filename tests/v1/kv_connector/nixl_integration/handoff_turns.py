# SPDX-License-Identifier: Apache-2.0
"""The turns of a conversation, as a router takes them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from handoff_client import (
    CLEAN_TIMEOUT_S,
    COMPLETIONS,
    POLL_S,
    Body,
    Client,
    completion,
    decode_params,
    handoffs,
    integrity,
    new_transfer_id,
    prefill_params,
    side_channel_address,
)
from handoff_workload import Ask, Tokens, words
from pd_launcher import Engine, Mode, Pair


@dataclass
class Talk:
    """What a router remembers of one conversation."""

    last: str | None = None
    turns: list[str] = field(default_factory=list)


async def forget(client: Client, engine: Engine) -> None:
    """Let an engine drop all that it keeps."""
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        reply = await client.post(engine, {}, "/reset_prefix_cache")
        assert reply.status == 200, reply
        document = await integrity(engine)
        if not document["pins"]["retained"]:
            return
        assert time.monotonic() < deadline, document
        await client.nudge(engine)
        await asyncio.sleep(POLL_S)


async def take_turn(
    client: Client,
    pair: Pair,
    mode: Mode,
    talk: Talk,
    prompt: Tokens,
    *,
    stream: bool = False,
    retain: bool = True,
) -> Tokens:
    """Do what a multi-turn router does for one turn."""
    transfer_id = new_transfer_id()
    body = completion(Ask(prompt))
    earlier: Body = {}
    if talk.last is not None:
        host, port = side_channel_address(pair.decode)
        earlier = {
            "retained_transfer_id": talk.last,
            "remote_host": host,
            "remote_port": port,
        }
    first = {
        **body,
        "max_tokens": 1,
        "kv_transfer_params": {**prefill_params(transfer_id), **earlier},
    }
    params: Body = decode_params(transfer_id, pair.prefill)
    if talk.last is not None:
        params["release_transfer_id"] = talk.last
    if not retain:
        params["retain"] = False
    second: Body = {**body, "kv_transfer_params": params}
    if mode == "push":
        prefill, answer = await asyncio.gather(
            client.post(pair.prefill, first),
            _decode(client, pair.decode, second, stream),
        )
        assert prefill.status == 200, prefill
    else:
        prefill = await client.post(pair.prefill, first)
        assert prefill.status == 200, prefill
        params.update(prefill.body["kv_transfer_params"])
        answer = await _decode(client, pair.decode, second, stream)
    if retain:
        talk.last = transfer_id
    talk.turns.append(transfer_id)
    return answer


async def _decode(client: Client, engine: Engine, body: Body, stream: bool) -> Tokens:
    if stream:
        return words(await client.stream(engine, body, COMPLETIONS))
    return (await client.post(engine, body)).tokens


async def reading(pair: Pair, transfer_id: str | None) -> dict[str, Any]:
    """P's record of what it read of a turn."""
    assert transfer_id is not None
    found = [
        record
        for record in await handoffs(pair.prefill, transfer_id)
        if record["role"] == "reader"
    ]
    assert found, f"{transfer_id} was not asked for"
    return found[-1]
