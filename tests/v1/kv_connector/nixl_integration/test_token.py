# SPDX-License-Identifier: Apache-2.0
"""Engines that share a token: who holds it is served, and nobody else has any effect.

Token files, CURVE and introductions by themselves, and agents that say anything at
all without a proof, are the business of ``unit/nixl/test_auth.py`` and
``unit/nixl/test_fuzz_loop.py``. That a decode engine with another token is not let
in follows from the side channel's silence; no third engine is started to see it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio

from handoff_client import (
    Client,
    Reply,
    assert_clean,
    completion,
    decode_params,
    integrity,
    new_transfer_id,
    side_channel_address,
    wait_handoff,
)
from handoff_engines import ROUTER_TIMEOUT_S, EngineRoom
from handoff_workload import Ask
from pd_launcher import Pair, Router
from pd_processes import LOOPBACK
from token_engines import (
    ANSWER_S,
    AT_ONCE,
    GREETING_BYTES,
    PROMPT,
    PROMPTS,
    Guarded,
    asked,
    cause_of,
    counter,
    guarded_pair,
    legs,
    most_heard,
    rank_of,
    run_tool,
    wait_table,
    was_called,
)
from token_visitors import (
    demands,
    false_introductions,
    register,
    turned_away,
    visitor,
)
from v1.kv_connector.unit.nixl.arena import NoReports, free_address
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    TransferId,
    new_registration_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancel,
    Done,
    HelloAck,
    Message,
    NotNeeded,
    Ping,
    Pong,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetFailure,
    SideChannelRequest,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

SILENCE_S = 1.0
OTHER = Token(secrets.token_bytes(32))


@pytest.fixture(scope="module")
def guarded(
    room: EngineRoom, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    room.close()
    with guarded_pair(tmp_path_factory.mktemp("token")) as running:
        yield running


@pytest_asyncio.fixture
async def pair(guarded: Guarded, client: Client) -> AsyncIterator[Pair]:
    """Both engines, which hold nothing once the test has ended."""
    yield guarded.pair
    await assert_clean(client, guarded.pair, guarded.token)


# ---- with the token


async def test_handoffs_are_right(client: Client, pair: Pair, guarded: Guarded) -> None:
    token = guarded.token
    before = await counter(pair.decode, token, "receiver_received")
    asks = [Ask(p, stream=place % 2 == 1) for place, p in enumerate(PROMPTS)]

    answers = await client.answers(pair.router, asks, AT_ONCE)

    assert guarded.references.problems(answers) == []
    after = await counter(pair.decode, token, "receiver_received")
    assert after - before == len(asks)
    transfer_id = new_transfer_id()
    _, decode = await client.hand_off(
        pair, "push", completion(Ask(PROMPT)), transfer_id
    )
    assert guarded.wrong(PROMPT, decode) is None
    taken = await wait_handoff(pair.decode, transfer_id, token)
    given = await wait_handoff(pair.prefill, transfer_id, token)
    assert (taken["outcome"], taken["tokens"]) == ("received", len(PROMPT)), taken
    assert (given["outcome"], given["tokens"]) == ("served", len(PROMPT)), given


async def test_the_tool(pair: Pair, guarded: Guarded) -> None:
    inside, outside = await asyncio.gather(
        run_tool(pair.decode, "--wait", "10", "--token-file", str(guarded.file)),
        run_tool(pair.decode),
    )

    assert inside.returncode == 0, inside
    assert json.loads(inside.stdout) == await integrity(pair.decode, guarded.token)
    assert outside.returncode == 2, outside
    assert outside.stdout == ""
    assert "did not answer" in outside.stderr


# ---- the side channel without it


async def test_the_side_channel_is_silent(
    client: Client, pair: Pair, guarded: Guarded
) -> None:
    transfer_id = new_transfer_id()
    body = completion(Ask(PROMPT))
    await client.hand_off(pair, "push", body, transfer_id)
    values: dict[str, Any] = {"pp_rank": 0, "tp_rank": 0, "transfer_id": transfer_id}
    questions: list[SideChannelRequest] = [
        kind(**{field: values[field] for field in kind.__struct_fields__})
        for kind in get_args(SideChannelRequest)
    ]
    await assert_clean(client, pair, guarded.token)
    for engine in (pair.prefill, pair.decode):
        before = await integrity(engine, guarded.token)

        outside = await asyncio.gather(
            *(
                asked(engine, question, token, SILENCE_S)
                for question in questions
                for token in (None, OTHER)
            )
        )
        heard = await asyncio.to_thread(most_heard, side_channel_address(engine))

        assert outside == [None] * len(outside)
        assert heard <= GREETING_BYTES
        assert await integrity(engine, guarded.token) == before
        for question in questions:
            inside = await asked(engine, question, guarded.token, ANSWER_S)
            assert inside is not None, question
            if isinstance(question, GetFailure):
                assert transfer_id in str(inside)
    _, decode = await client.hand_off(pair, "push", body, new_transfer_id())
    assert guarded.wrong(PROMPT, decode) is None


async def test_the_side_channel_listens_on_its_host_alone(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        socket.create_connection((LOOPBACK, engine.side_channel_port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", engine.side_channel_port), 5)


# ---- agents without it


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_agent_without_the_token_is_turned_away(
    client: Client, pair: Pair, guarded: Guarded, leg: str
) -> None:
    engine = pair.prefill if leg == "prefill" else pair.decode
    host = await rank_of(engine, guarded.token)
    before = await integrity(engine, guarded.token)
    said = demands(new_transfer_id(), len(PROMPT), new_registration_id())
    with visitor("guest", host) as guest, visitor("stranger", host) as stranger:
        overheard = guest.introduction(guarded.token)
        lies = false_introductions(
            stranger, guarded.token, OTHER, overheard, guest.name
        )

        await turned_away(stranger, engine, said, lies)

        # The engine tells its tables' sizes when it steps.
        await client.nudge(engine)
        assert await integrity(engine, guarded.token) == before
        assert stranger.listen() == []
        # So that what the stranger is refused is not refused to all.
        guest.send(Ping(), overheard)
        await guest.until(lambda heard: len(heard) == 2)
        assert guest.heard == [HelloAck(None), Pong()]


@pytest.mark.parametrize("stage", ["registered", "offered"])
async def test_a_handoff_is_out_of_a_strangers_reach(
    client: Client, pair: Pair, guarded: Guarded, stage: str
) -> None:
    """It goes to the decode engine and to a guest, as announced, and not to him."""
    prefill, token = pair.prefill, guarded.token
    host = await rank_of(prefill, token)
    transfer_id = new_transfer_id()
    first, second = legs(prefill, transfer_id, receivers=2)
    wanted = register(transfer_id, len(PROMPT))
    with visitor("guest", host) as guest, visitor("stranger", host) as stranger:
        overheard = guest.introduction(token)
        lies = false_introductions(stranger, token, OTHER, overheard, guest.name)
        said = demands(transfer_id, len(PROMPT), wanted.registration_id)
        if stage == "registered":
            decoding = asyncio.create_task(client.post(pair.decode, second))
            guest.send(wanted, overheard)
            await guest.until(lambda heard: Accepted(wanted.registration_id) in heard)
            await wait_table(client, prefill, token, "rank0_sender_claims", 2)

            await turned_away(stranger, prefill, said, lies)

            await wait_table(client, prefill, token, "rank0_sender_claims", 2)
            assert not guest.cache.any()
            assert (await client.post(prefill, first)).status == 200
        else:
            assert (await client.post(prefill, first)).status == 200
            await wait_table(client, prefill, token, "rank0_sender_handoffs", 1)

            await turned_away(stranger, prefill, said, lies)

            await wait_table(client, prefill, token, "rank0_sender_handoffs", 1)
            decoding = asyncio.create_task(client.post(pair.decode, second))
            guest.send(wanted, overheard)
        await guest.until(
            lambda heard: any(isinstance(message, Done) for message in heard)
        )
        assert guest.written(len(PROMPT))
        decode = await decoding
        assert stranger.listen() == []
        assert not stranger.cache.any()
    assert guarded.wrong(PROMPT, decode) is None
    given = await wait_handoff(prefill, transfer_id, token)
    assert (given["outcome"], given["tokens"]) == ("served", 2 * len(PROMPT)), given
    taken = await wait_handoff(pair.decode, transfer_id, token)
    assert (taken["outcome"], taken["tokens"]) == ("received", len(PROMPT)), taken


@pytest.mark.parametrize("how", ["cancel", "not_needed"])
async def test_a_guest_can_end_a_handoff(
    client: Client, pair: Pair, guarded: Guarded, how: str
) -> None:
    """What a stranger says in vain has an effect if one with the token says it."""
    host = await rank_of(pair.prefill, guarded.token)
    transfer_id = new_transfer_id()
    first, _ = legs(pair.prefill, transfer_id, receivers=1)
    assert (await client.post(pair.prefill, first)).status == 200
    name = TransferId(transfer_id)
    said: Message = (
        NotNeeded(name, 0)
        if how == "not_needed"
        else Cancel(new_registration_id(), name)
    )
    with visitor("guest", host) as guest:
        guest.send(said, guest.introduction(guarded.token))
        await guest.until(bool)
        # The engine learns of it when it steps.
        await client.nudge(pair.prefill)
        given = await wait_handoff(pair.prefill, transfer_id, guarded.token)
    assert given["outcome"] == "released", given


# ---- where a decode engine may be sent


async def test_hosts_that_are_not_allowed_are_not_contacted(
    client: Client, pair: Pair, guarded: Guarded
) -> None:
    token, decode = guarded.token, pair.decode
    before = await counter(decode, token, "peer_not_allowed")
    # Each leads to the same socket as the allowed one.
    hosts = ["localhost", "127.0.0.2", "0.0.0.0", "127.1"]
    with socket.create_server(("0.0.0.0", 0)) as listening:
        listening.setblocking(False)
        port = int(listening.getsockname()[1])

        async def ask(host: str) -> Reply:
            params = decode_params(new_transfer_id(), pair.prefill)
            params |= {"remote_host": host, "remote_port": port}
            body = completion(Ask(PROMPT), kv_transfer_params=params)
            return await client.post(decode, body)

        for host, reply in zip(
            hosts, await asyncio.gather(*map(ask, hosts)), strict=True
        ):
            assert guarded.wrong(PROMPT, reply) is None, host
        await asyncio.sleep(SILENCE_S)
        assert not was_called(listening)
        after = await counter(decode, token, "peer_not_allowed")
        assert after - before == len(hosts)
        log = decode.log_path.read_text()
        for host in hosts:
            assert f"remote_host {host!r} is not in allowed_peers" in log

        assert (await ask(LOOPBACK)).status == 500
        assert was_called(listening)


async def test_an_engine_with_another_token_is_no_source(
    client: Client, pair: Pair, guarded: Guarded
) -> None:
    """To the decode engine it is one that does not answer, and the cause says why."""
    info = await rank_of(pair.prefill, guarded.token)

    async def ask(token: Token | None) -> None:
        address = free_address()
        server = SideChannelServer(address, [encode(info)], NoReports(), token)
        try:
            transfer_id = new_transfer_id()
            params = decode_params(transfer_id, pair.prefill)
            params["remote_port"] = address[1]
            body = completion(Ask(PROMPT), kv_transfer_params=params)
            reply = await client.post(pair.decode, body)
        finally:
            await asyncio.to_thread(server.close)
        assert reply.status == 500, reply
        cause = await cause_of(pair.decode, transfer_id, guarded.token)
        where = f"{LOOPBACK}:{address[1]}"
        assert f"no answer from the side channel at {where}" in cause
        assert "have the same side_channel_token_file" in cause

    await asyncio.gather(ask(OTHER), ask(None))


async def test_a_router_needs_the_token_to_tell_causes(
    client: Client, pair: Pair, guarded: Guarded, tmp_path: Path
) -> None:
    # Where these routers believe the prefill engine's side channel, nobody listens.
    astray = copy.copy(pair.prefill)
    astray.side_channel_port = 1
    option = ("--side-channel-token-file", str(guarded.file))
    routers = [
        Router(name, "push", [astray], [pair.decode], tmp_path, options)
        for name, options in (("inside", option), ("outside", ()))
    ]
    try:
        for router in routers:
            router.start()
        for router in routers:
            await asyncio.to_thread(router.wait_ready, ROUTER_TIMEOUT_S)
        body = completion(Ask(PROMPT))
        inside, outside = await asyncio.gather(
            *(client.post(router, body) for router in routers)
        )
    finally:
        for router in routers:
            router.stop()

    for reply in (inside, outside):
        assert reply.status == 503, reply
        assert reply.body["error"]["retryable"] is True
        transfer_id = reply.body["error"]["transfer_id"]
        cause = await cause_of(pair.decode, transfer_id, guarded.token)
        assert f"{LOOPBACK}:1" in cause
        told = f"decode engine: {cause}" if reply is inside else None
        assert reply.body["error"].get("detail") == told
    assert "the engines' own?" in routers[1].log_path.read_text()


async def test_the_secret_is_in_no_log(pair: Pair, guarded: Guarded) -> None:
    secret = guarded.file.read_text().strip()
    for server in (pair.prefill, pair.decode, pair.router):
        log = server.log_path.read_text()
        assert log
        assert secret not in log
