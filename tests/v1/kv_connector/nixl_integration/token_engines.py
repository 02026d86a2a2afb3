# SPDX-License-Identifier: Apache-2.0
"""A pair of engines that share a token, and questions to them from in- and outside."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

import kv_integrity
from handoff_client import (
    CLEAN_TIMEOUT_S,
    POLL_S,
    REQUEST_TIMEOUT_S,
    Body,
    Client,
    Reply,
    completion,
    decode_params,
    handoffs,
    integrity,
    prefill_params,
    side_channel_address,
    wait_handoff,
)
from handoff_engines import NUM_BLOCKS, SPEC
from handoff_workload import Ask, References, Tokens
from pd_launcher import (
    CONNECTORS,
    Engine,
    EngineConfig,
    Mode,
    Pair,
    Role,
    TransferConfig,
    pair,
    transfer_config,
)
from pd_processes import LOOPBACK
from tiny_model import random_prompt, tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelFailure,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetRanks,
    Ranks,
    SideChannelReply,
    SideChannelRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    decode_rank,
)
from warm_engines import WarmEngine

HANDSHAKE_TIMEOUT_S = 3.0
# Long enough to be spoken of, and over before a test gives up waiting for it.
LEASE_S = 10.0
AT_ONCE = 4
ANSWER_S = 10.0
TOOL_S = 120.0
GREETING_BYTES = 64
"""A ZMQ server sends so many before it knows who called."""

_rng = random.Random("token")
PROMPTS: tuple[Tokens, ...] = tuple(
    tuple(random_prompt(length, _rng, SPEC)) for length in (33, 40, 100, 333, 700)
)
PROMPT = PROMPTS[3]


# ---- engines


@dataclass(frozen=True)
class Guarded:
    """Engines with a token, and what they answer without a hand-off."""

    pair: Pair
    token: Token
    file: Path
    references: References

    def wrong(self, prompt: Tokens, reply: Reply) -> str | None:
        """What is wrong with an answer, if anything is."""
        return self.references.check(Ask(prompt), reply.tokens)


@contextlib.contextmanager
def guarded_pair(folder: Path) -> Iterator[Guarded]:
    """Run two engines and a router with a token; D may contact loopback alone."""
    file = folder / "token"
    file.write_text(secrets.token_hex(32) + "\n")
    token = Token.load(str(file))
    assert token is not None

    def connector(mode: Mode, role: Role) -> TransferConfig:
        extra: dict[str, Any] = {
            "side_channel_token_file": str(file),
            "handshake_timeout": HANDSHAKE_TIMEOUT_S,
            "kv_lease_duration": LEASE_S,
            # A visitor answers no pings while the test waits for something else.
            "peer_timeout": REQUEST_TIMEOUT_S,
        }
        if role == "kv_consumer":
            extra["allowed_peers"] = [LOOPBACK]
        return transfer_config(CONNECTORS[mode], role, extra_config=extra)

    # Without a prefix cache every hand-off moves the whole prompt.
    config = EngineConfig(
        model=str(tiny_model(SPEC)), num_gpu_blocks=NUM_BLOCKS, prefix_caching=False
    )
    option = ("--side-channel-token-file", str(file))
    with pair(
        "push",
        config,
        log_dir=folder,
        connector=connector,
        router_arguments=option,
        engine_class=WarmEngine,
    ) as running:
        answers = asyncio.run(_answers(running.decode))
        yield Guarded(running, token, file, References(answers))


async def _answers(engine: Engine) -> dict[Tokens, Tokens]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asks = [Ask(prompt) for prompt in PROMPTS]
        answers = await Client(session).answers(engine, asks, AT_ONCE)
    return {ask.prompt: tokens for ask, tokens in answers}


# ---- requests


def legs(prefill: Engine, transfer_id: str, receivers: int) -> tuple[Body, Body]:
    """What the prefill and the decode engine are sent."""
    body = completion(Ask(PROMPT))
    first = {
        **body,
        "max_tokens": 1,
        "kv_transfer_params": prefill_params(transfer_id, receivers),
    }
    return first, {**body, "kv_transfer_params": decode_params(transfer_id, prefill)}


async def wait_table(
    client: Client, engine: Engine, token: Token, table: str, count: int
) -> None:
    """Wait until one of an engine's tables has so many entries.

    Raises:
        AssertionError: it does not have them in time.
    """
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        await client.nudge(engine)
        tables = (await integrity(engine, token))["tables"]
        if tables.get(table, 0) == count:
            return
        assert time.monotonic() < deadline, f"{engine.name} holds {tables}"
        await asyncio.sleep(POLL_S)


# ---- questions


async def asked(
    engine: Engine, request: SideChannelRequest, token: Token | None, seconds: float
) -> SideChannelReply | None:
    """The answer of a side channel; None where it gives none.

    Raises:
        SideChannelFailure: it answers with an error.
    """
    address = side_channel_address(engine)
    try:
        return await asyncio.to_thread(query, address, request, seconds, token)
    except SideChannelFailure as failure:
        if "did not answer" not in str(failure):
            raise
        return None


async def rank_of(engine: Engine, token: Token) -> RankInfo:
    """How an engine's worker describes itself."""
    reply = await asked(engine, GetRanks(), token, ANSWER_S)
    assert isinstance(reply, Ranks)
    (rank,) = reply.ranks
    return decode_rank(rank)


async def counter(engine: Engine, token: Token, name: str) -> int:
    """One of the totals of an engine."""
    return int((await integrity(engine, token))["counters"].get(name, 0))


async def cause_of(engine: Engine, transfer_id: str, token: Token) -> str:
    """Why a hand-off to an engine failed, in the engine's words."""
    await wait_handoff(engine, transfer_id, token)
    records = await handoffs(engine, transfer_id, token)
    (cause,) = [r["cause"] for r in records if r["outcome"] == "failed"]
    return str(cause)


async def run_tool(engine: Engine, *options: str) -> subprocess.CompletedProcess[str]:
    """Ask for an engine's integrity as people do."""
    command = [sys.executable, kv_integrity.__file__, engine.side_channel, *options]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        check=False,
    )


def most_heard(address: tuple[str, int]) -> int:
    """Send anything at all; returns the most bytes that came back."""
    rng = random.Random("raw")
    most = 0
    for number in range(12):
        mechanism = (b"NULL", b"CURVE", b"PLAIN")[number % 3]
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0")
        greeting = greeting.ljust(GREETING_BYTES, b"\0")
        heard = 0
        with socket.create_connection(address, ANSWER_S) as stream:
            stream.settimeout(0.2)
            try:
                stream.sendall(greeting + rng.randbytes(number * 50))
                while data := stream.recv(4096):
                    heard += len(data)
            except OSError:
                pass
        most = max(most, heard)
    return most


def was_called(listening: socket.socket) -> bool:
    """Whether somebody has connected to a socket that does not block."""
    try:
        listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True
