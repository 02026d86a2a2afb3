# SPDX-License-Identifier: Apache-2.0
"""Live engines, told what no client and no peer should say, go on as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings

from handoff_client import (
    COMPLETIONS,
    Client,
    assert_clean,
    completion,
    decode_params,
    new_transfer_id,
    prefill_params,
    side_channel_address,
)
from handoff_engines import LEASE_S
from handoff_workload import Ask, References, fresh, words
from modes import PULL_IN_FULL
from pd_launcher import Engine, Mode, Pair
from v1.kv_connector.unit.nixl.arena import Stranger
from v1.kv_connector.unit.nixl.hostile import PARAMS, bodies, mutations
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode as NixlMode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import query
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Hello,
    Packet,
    Ping,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetRanks,
    Ranks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    decode_rank,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

AT_ONCE = 8
ANSWER_S = 90.0
MESSAGES = 300


def _hostile(pair: Pair, used: str) -> dict[str, str]:
    """``kv_transfer_params`` as they stand in a body, by what is wrong with them."""
    own = decode_params(new_transfer_id(), pair.decode)
    good = decode_params(new_transfer_id(), pair.prefill)
    source = prefill_params(new_transfer_id())
    values: dict[str, Any] = {name: params for name, params in PARAMS if params}
    values |= {
        "a stale id, to be received": {**good, "transfer_id": used},
        "a stale id, to be sent": {**source, "transfer_id": used},
        "the wrong engine id": {**good, "remote_engine_id": "somebody"},
        "the receiver's own side channel": own,
        "an HTTP port": {**good, "remote_port": pair.prefill.port},
        "a host that is none": {**good, "remote_host": "no-such-host.invalid"},
        "a host with a NUL": {**good, "remote_host": "127.0.0.1\0"},
        "the unspecified host": {**good, "remote_host": "0.0.0.0", "remote_port": 1},
        "a broadcast": {**good, "remote_host": "255.255.255.255"},
        "a group": {**good, "remote_host": "ff02::1"},
        "another request's id": {**good, "remote_request_id": "cmpl-1", **source},
        "ranks that are not there": {**good, "tp_size": 4096, "pp_size": 4096},
        "block ids": {**source, "remote_block_ids": [[0, 1, 2], [2**40]]},
        "true": True,
        "a number": 7,
    }
    texts = {name: json.dumps(value) for name, value in values.items()}
    return texts | {
        "very deep": "[" * 100_000 + "]" * 100_000,
        "deep": '{"a":' * 150 + "1" + "}" * 150,
        "a huge integer": '{"do_remote_decode": 1%s}' % ("0" * 5000),
        "a large integer": '{"do_remote_prefill": true, "remote_port": 1%s}'
        % ("0" * 4000),
        "not a number": '{"do_remote_prefill": true, "remote_port": NaN}',
        "infinity": '{"do_remote_decode": true, "num_receivers": Infinity}',
        "a megabyte": '{"do_remote_decode": true, "transfer_id": "%s"}' % ("x" * 10**6),
        "a lone surrogate": '{"do_remote_decode": true, "transfer_id": "\\ud800"}',
        "a surrogate as a key": '{"do_remote_decode": true, "\\ud800": 1}',
        "a key twice": '{"do_remote_decode": true, "do_remote_decode": {}}',
    }


async def _ask(
    session: aiohttp.ClientSession, engine: Engine, prompt: tuple[int, ...], params: str
) -> tuple[int, str]:
    body = json.dumps(completion(Ask(prompt)))
    text = f'{body[:-1]}, "kv_transfer_params": {params}}}'
    async with session.post(
        engine.url + COMPLETIONS,
        data=text.encode(),
        headers={"Content-Type": "application/json"},
    ) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@PULL_IN_FULL
async def test_hostile_params(
    client: Client, pair: Pair, mode: Mode, references: References, leg: str
) -> None:
    """Each is refused, fails, or is served rightly; the engine serves the next."""
    engine = pair.prefill if leg == "prefill" else pair.decode
    prompts = fresh("invalid")
    used = new_transfer_id()
    _, served = await client.hand_off(
        pair, mode, completion(Ask(prompts[0]), max_tokens=1), used
    )
    assert served.status == 200
    problems: list[str] = []
    turns = asyncio.Semaphore(AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)

    async def one(number: int, name: str, params: str) -> None:
        prompt = prompts[number % len(prompts)]
        async with turns:
            try:
                status, text = await _ask(session, engine, prompt, params)
            except (TimeoutError, aiohttp.ClientError) as error:
                problems.append(f"{name}: {error!r}")
                return
        if status == 200:
            got = words(json.loads(text)["choices"][0]["text"])
            if got != references.expected(prompt):
                problems.append(f"{name}: wrong answer {got}")
        elif status not in (400, 422, 500):
            problems.append(f"{name}: status {status}: {text[:200]}")

    async with aiohttp.ClientSession(timeout=timeout) as session:
        hostile = _hostile(pair, used)
        await asyncio.gather(
            *(one(n, name, params) for n, (name, params) in enumerate(hostile.items()))
        )
    assert problems == []
    await _still_serves(client, pair, references)


@PULL_IN_FULL
async def test_hostile_side_channel(
    client: Client, pair: Pair, references: References
) -> None:
    for engine in (pair.prefill, pair.decode):
        await asyncio.to_thread(_pester, side_channel_address(engine))
    await _still_serves(client, pair, references)


def _pester(address: tuple[str, int]) -> None:
    rng = random.Random("pester")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for number in range(100):
        # It may hang up before it has all.
        with (
            socket.create_connection(address, 10) as stream,
            contextlib.suppress(OSError),
        ):
            stream.sendall(greeting * (number % 2) + rng.randbytes(number * 7))
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://{address[0]}:{address[1]}")
        for number in range(200):
            frames = [rng.randbytes(number) for _ in range(1 + number % 5)]
            sock.send_multipart(frames)
        for _ in range(200):
            assert sock.poll(10_000), "a question was not answered"
            sock.recv_multipart()


@PULL_IN_FULL
async def test_hostile_agent(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    """One that nobody knows, and one that is let in."""
    for known in (False, True):
        for engine in (pair.prefill, pair.decode):
            (info,) = await asyncio.to_thread(_ranks, engine)
            await asyncio.to_thread(_heckle, NixlMode(mode), info, known)
    # What it has asked for is kept for that long.
    await asyncio.sleep(LEASE_S)
    await _still_serves(client, pair, references)


def _ranks(engine: Engine) -> tuple[RankInfo, ...]:
    reply = query(side_channel_address(engine), GetRanks(), 10)
    assert isinstance(reply, Ranks)
    return tuple(decode_rank(rank) for rank in reply.ranks)


def _messages() -> list[bytes]:
    found: list[bytes] = []

    @settings(
        max_examples=MESSAGES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies, mutations)
    def collect(body: Any, mutate: Any) -> None:
        found.append(mutate(encode(Packet(PROTOCOL_VERSION, None, body))))

    collect()
    return found


def _heckle(mode: NixlMode, victim: RankInfo, known: bool) -> None:
    stranger = Stranger("stranger", mode, victim)
    try:
        own = msgspec.structs.replace(
            victim,
            engine_id=stranger.info.engine_id,
            agent_name=stranger.name,
            agent_metadata=stranger.info.agent_metadata,
            process=stranger.info.process,
        )
        hello = Hello(encode(own), b"") if known else None
        heard: list[bytes] = []
        for data in _messages():
            if hello is not None:
                stranger.send(Ping(), hello)
            stranger.say(data)
            heard += stranger.hear()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            heard += stranger.hear()
            time.sleep(0.01)
        assert bool(heard) == known
    finally:
        stranger.close()


async def _still_serves(client: Client, pair: Pair, references: References) -> None:
    await assert_clean(client, pair)
    prompt = fresh("after")[-1]
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)
