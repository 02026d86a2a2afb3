# SPDX-License-Identifier: Apache-2.0
"""Sends the legs of a request as routers for the base and for this project do.

No router process takes part: every system is driven alike, and what a router costs
is in no row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp

from bench_requests import (
    COMPLETIONS,
    Answer,
    Body,
    TurnError,
    completion,
    post,
    read_stream,
    streamed,
)
from multiturn_legs import Endpoint, Mode

Dialect = Literal["base", "ours"]


@dataclass(frozen=True)
class Target:
    """The engines that serve a request; without ``mode`` only ``decode`` does.

    Attributes:
        dialect: whose ``kv_transfer_params`` the engines expect.
        prefill_engine_id: what a base's decode engine must be told in push.
    """

    model: str
    decode: Endpoint
    prefill: Endpoint | None = None
    mode: Mode | None = None
    dialect: Dialect = "ours"
    prefill_engine_id: str = ""


async def serve(
    session: aiohttp.ClientSession,
    target: Target,
    request_id: str,
    prompt: Sequence[int],
    tokens: int,
) -> Answer:
    """Have a request served.

    ``request_id`` goes to both legs: the base's push finds a registration by it.

    Raises:
        TurnError: there is no whole answer.
    """
    started = time.monotonic()
    second = streamed(completion(target.model, prompt, tokens))
    second["request_id"] = request_id
    if target.prefill is None:
        return await read_stream(session, target.decode.url, second, started)
    first = {
        **completion(target.model, prompt, 1),
        "request_id": request_id,
        "kv_transfer_params": prefill_params(target, request_id),
    }
    url = target.prefill.url + COMPLETIONS
    if target.mode == "pull":
        reply = await post(session, url, first)
        second["kv_transfer_params"] = pull_params(
            target, request_id, reply.get("kv_transfer_params") or {}
        )
        return await read_stream(session, target.decode.url, second, started)
    second["kv_transfer_params"] = push_params(target, request_id)
    try:
        # One leg's failure calls off the other.
        async with asyncio.TaskGroup() as legs:
            legs.create_task(post(session, url, first))
            answer = legs.create_task(
                read_stream(session, target.decode.url, second, started)
            )
    except ExceptionGroup as group:
        failed, others = group.split(TurnError)
        if failed is None or others is not None:
            raise
        raise TurnError("; ".join(str(e) for e in failed.exceptions)) from group
    return answer.result()


def prefill_params(target: Target, request_id: str) -> Body:
    """What the prefill leg carries."""
    params: Body = {"do_remote_decode": True, "do_remote_prefill": False}
    if target.dialect == "ours":
        return {**params, "transfer_id": request_id, "num_receivers": 1}
    unknown = ("engine_id", "block_ids", "host", "port")
    return {**params, **{f"remote_{name}": None for name in unknown}}


def pull_params(target: Target, request_id: str, told: Body) -> Body:
    """What the decode leg carries once P has answered with ``told``."""
    if target.dialect == "ours":
        return {**told, "transfer_id": request_id, "num_receivers": 1}
    return told


def push_params(target: Target, request_id: str) -> Body:
    """What the decode leg carries while P still computes.

    Raises:
        TurnError: P's side channel is not known.
    """
    prefill = target.prefill
    if prefill is None or prefill.side_channel is None:
        raise TurnError("the side channel of the prefill engine is not known")
    host, port = prefill.side_channel
    params: Body = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": host,
        "remote_port": port,
        "tp_size": prefill.tp_size,
        "pp_size": prefill.pp_size,
    }
    if target.dialect == "ours":
        return {**params, "transfer_id": request_id, "remote_engine_id": None}
    return {
        **params,
        "remote_engine_id": target.prefill_engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": None,
    }
