# SPDX-License-Identifier: Apache-2.0
"""Runs one setting of the multi-turn benchmark on engines that are up."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

import kv_integrity
from bench_requests import COMPLETIONS, TurnError, post
from multiturn_legs import DirectLegs, Endpoint, Legs, Mode, RoutedLegs, Served
from multiturn_records import Run, Turn
from multiturn_traffic import Conversation, Setting, Traffic, conversations
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelFailure,
)

RECORDS_TIMEOUT_S = 10.0
RESET_TIMEOUT_S = 30.0
REST_S = 1.3
"""An engine's worker spins for a second after its last step."""

_POLL_S = 0.2
_NOT_ASKED = "not asked"
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fleet:
    """The engines of one mode.

    Attributes:
        prefill: by whether prefix caching is on.
        router_url: of the multi-turn router; ``None``: the legs are sent here.
        token: what the side channels ask for, if they do.
        reset: empty the engines' caches before each run.
    """

    mode: Mode
    model: str
    prefill: Mapping[bool, Endpoint]
    decode: Endpoint
    router_url: str | None = None
    token: Token | None = None
    reset: bool = True


@dataclass(frozen=True)
class Measured:
    """A turn that was served, and what was sent for it."""

    conversation: int
    turn: int
    new_tokens: int
    prompt_tokens: int
    served: Served


async def run_setting(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    setting: Setting,
    traffic: Traffic,
    repetition: int,
    place: int,
) -> Run:
    """Run the traffic of one repetition.

    A turn that fails is an error in the result.

    Raises:
        TurnError: the engines cannot be reset, or do not tell what they read.
    """
    prefill = fleet.prefill[setting.p_prefix_caching]
    engines = (prefill, fleet.decode)
    if fleet.reset:
        await asyncio.gather(*(reset(session, e.url, fleet.model) for e in engines))
    await asyncio.sleep(REST_S)
    run = Run(
        fleet.mode,
        setting,
        repetition,
        place,
        comparable=fleet.reset,
        through_router=fleet.router_url is not None,
        started_at=time.time(),
        load_average=os.getloadavg()[0],
    )
    nonce = "" if fleet.reset else f"{fleet.mode} {setting.name} {run.started_at}"
    before = await _reader_tokens(prefill, fleet.token)
    began = time.monotonic()
    measured = await asyncio.gather(
        *(
            _converse(_legs(session, fleet, setting), conversation, traffic, run.errors)
            for conversation in conversations(traffic, repetition, nonce)
        )
    )
    run.seconds = time.monotonic() - began
    await _describe(run, [turn for turns in measured for turn in turns], fleet, prefill)
    after = await _reader_tokens(prefill, fleet.token)
    if before is not None and after is not None:
        run.reader_tokens = after - before
    return run


async def reset(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Empty an engine's prefix cache and let it drop what it keeps.

    Raises:
        TurnError: it does not offer that, or blocks stay in use for 30 s.
    """
    deadline = time.monotonic() + RESET_TIMEOUT_S
    while True:
        try:
            reply = await post(session, f"{url}/reset_prefix_cache", {})
        except TurnError as error:
            raise TurnError(
                f"{error}. The engine must be started with VLLM_SERVER_DEV_MODE=1 for "
                "settings to be compared on equal prompts; otherwise say --no-reset"
            ) from error
        if reply.get("success"):
            return
        if time.monotonic() > deadline:
            raise TurnError(
                f"{url} could not empty its cache for {RESET_TIMEOUT_S:.0f} s because "
                "blocks are in use: end all other traffic"
            )
        # An idle engine lets go of blocks in its next step.
        body: dict[str, Any] = {"model": model, "prompt": [5], "max_tokens": 1}
        await post(session, url + COMPLETIONS, body)
        await asyncio.sleep(_POLL_S)


def _legs(session: aiohttp.ClientSession, fleet: Fleet, setting: Setting) -> Legs:
    if fleet.router_url is not None:
        conversation = uuid.uuid4().hex if setting.bidirectional else None
        return RoutedLegs(session, fleet.model, fleet.router_url, conversation)
    return DirectLegs(
        session,
        fleet.model,
        fleet.mode,
        fleet.prefill[setting.p_prefix_caching],
        fleet.decode,
        reuse=setting.bidirectional,
    )


async def _converse(
    legs: Legs, conversation: Conversation, traffic: Traffic, errors: list[str]
) -> list[Measured]:
    history: tuple[int, ...] = ()
    measured = []
    for turn, (said, pause) in enumerate(
        zip(conversation.said, conversation.pauses, strict=True), start=1
    ):
        await asyncio.sleep(pause)
        prompt = history + said
        try:
            served = await legs.serve(
                prompt, traffic.answer_tokens, last=turn == traffic.turns
            )
        except TurnError as error:
            errors.append(f"conversation {conversation.number}, turn {turn}: {error}")
            break
        measured.append(
            Measured(conversation.number, turn, len(said), len(prompt), served)
        )
        history = prompt + served.answer.tokens
    return measured


async def _describe(
    run: Run, measured: Sequence[Measured], fleet: Fleet, prefill: Endpoint
) -> None:
    asked = {one.served.asked for one in measured if one.served.asked is not None}
    records = await _reader_records(prefill, asked, fleet.token) if asked else {}
    run.turns = [describe(one, records) for one in measured]


def describe(one: Measured, records: Mapping[str, Mapping[str, Any]]) -> Turn:
    """Put together what client, P's response and P's record of the READ tell."""
    served, prefill = one.served, one.served.prefill
    computed = cached = read = None
    transfer = compute = waiting = None
    outcome = None
    if prefill is not None:
        record = None if served.asked is None else records.get(served.asked)
        if record is not None:
            outcome = str(record["outcome"])
            read = int(record["tokens"]) if outcome == "read" else 0
            transfer = float(record["seconds"])
        elif served.asked is None:
            outcome, read, transfer = _NOT_ASKED, 0, 0.0
        else:
            outcome = _UNKNOWN
        if prefill.cached is not None:
            computed = prefill.prompt_tokens - prefill.cached
            cached = None if read is None else prefill.cached - read
        compute = prefill.compute
        if compute is not None and transfer is not None:
            waiting = prefill.seconds - transfer - compute
    return Turn(
        conversation=one.conversation,
        turn=one.turn,
        prompt_tokens=one.prompt_tokens,
        new_tokens=one.new_tokens,
        ttft=served.answer.ttft,
        total=served.answer.total,
        prefill=None if prefill is None else prefill.seconds,
        transfer=transfer,
        compute=compute,
        waiting=waiting,
        tokens_computed=computed,
        tokens_cached=cached,
        tokens_read=read,
        read_outcome=outcome,
        answer=served.answer.tokens,
    )


async def _reader_records(
    prefill: Endpoint, asked: set[str], token: Token | None
) -> dict[str, dict[str, Any]]:
    """P's records of these READs, as far as they come within ten seconds."""
    if prefill.side_channel is None:
        return {}
    deadline = time.monotonic() + RECORDS_TIMEOUT_S
    while True:
        listed = await _ask(kv_integrity.handoffs, prefill, token)
        found = {
            record["transfer_id"]: record
            for record in listed
            if record["role"] == "reader" and record["transfer_id"] in asked
        }
        if len(found) == len(asked) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def _reader_tokens(prefill: Endpoint, token: Token | None) -> int | None:
    if prefill.side_channel is None:
        return None
    document = await _ask(kv_integrity.integrity, prefill, token)
    return int(document["counters"].get("reader_tokens", 0))


async def _ask(question: Any, engine: Endpoint, token: Token | None) -> Any:
    try:
        return await asyncio.to_thread(question, engine.side_channel, token=token)
    except SideChannelFailure as error:
        host, port = engine.side_channel or ("", 0)
        raise TurnError(
            f"the side channel {host}:{port} of {engine.url} did not answer: {error}"
        ) from error
