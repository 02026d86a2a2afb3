# SPDX-License-Identifier: Apache-2.0
"""Streams: the engine's bytes, unchanged and at once; failures in the middle."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pd_router.sse import event_data
from router_backends import (
    CHAT,
    DONE,
    ERROR,
    FAST,
    Cluster,
    answers,
    chat_chunk,
    event,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

STREAM = {"prompt": "p", "stream": True}
SMILE = 'data: {"choices": [{"text": "\u00e4 \U0001f600"}]}\n\n'.encode()
# Spacing, line ends, comments, fields and key order that a rewrite would lose.
ODD = (
    b": keep-alive\n\n"
    b'data:{"z":1,  "choices":[{"text":"a"}],"a":1.0}\n\n'
    b'event: x\r\nid: 7\r\ndata: {"choices": [{"text": "b"}]}\r\n\r\n'
    + SMILE
    + b": again\n\n"
    b'data: {"choices": [{"text":\ndata: "c \\"error\\" [DONE]"}]}\n\n' + DONE
)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 3, 7, 64, 10_000])
async def test_bytes_pass_unchanged_however_they_are_cut(
    cluster: Cluster, size: int
) -> None:
    await cluster.start("push", answers(), streams(*pieces(ODD, size)))
    got = await cluster.post(STREAM)
    assert got.status == 200
    assert got.body == ODD
    assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert "Content-Length" not in got.headers


async def test_a_stream_with_carriage_returns_at_its_very_end(
    cluster: Cluster,
) -> None:
    data = b'data: {"choices": []}\r\n\r\ndata: [DONE]\r\n\r'
    await cluster.start("push", answers(), streams(data, b"\n", gap=0.05))
    assert (await cluster.post(STREAM)).body == data + b"\n"


async def test_a_chat_stream_passes_role_chunk_included(cluster: Cluster) -> None:
    data = (
        chat_chunk({"role": "assistant", "content": ""})
        + chat_chunk({"content": "hi"})
        + chat_chunk({}, "stop")
        + DONE
    )
    await cluster.start("push", answers(), streams(*pieces(data, 50)))
    got = await cluster.post({"messages": [], "stream": True}, CHAT)
    assert got.body == data


async def test_every_event_is_passed_on_at_once(cluster: Cluster) -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def script(seen: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(seen.request)
        for index, gate in enumerate(gates):
            await response.write(token(str(index)))
            await gate.wait()
        await response.write(DONE)
        return response

    await cluster.start("push", answers(), script)
    async with cluster.client.post("/v1/completions", json=STREAM) as response:
        for index, gate in enumerate(gates):
            expected = token(str(index))
            async with asyncio.timeout(5):
                assert await response.content.readexactly(len(expected)) == expected
            gate.set()
        assert await response.read() == DONE


def errors_of(body: bytes) -> list[Any]:
    return [
        json.loads(data)["error"]
        for block in body.split(b"\n\n")
        if (data := event_data(block)) and b'"error"' in data
    ]


@pytest.mark.parametrize("end", ["abort", "clean"])
async def test_an_engine_that_dies_in_mid_stream_is_told_and_not_done(
    cluster: Cluster, end: str
) -> None:
    unfinished = b'data: {"choices'
    script = streams(token("a"), token("b"), unfinished, gap=0.02, end=end)
    await cluster.start("push", answers(), script)
    got = await cluster.post(STREAM)
    assert got.status == 200
    assert got.body.startswith(token("a") + token("b") + b'data: {"error"')
    assert b"[DONE]" not in got.body
    (error,) = errors_of(got.body)
    seen = cluster.decode[0].seen[0]
    assert error["type"] == "kv_handoff_failed"
    assert error["cause"] == "decode_broken"
    assert error["transfer_id"] == seen.params["transfer_id"]
    assert (
        await cluster.metric("pd_router_requests_total", outcome="stream_failed") == 1
    )
    await cluster.quiet()


async def test_an_error_event_in_mid_stream_is_the_last_one(cluster: Cluster) -> None:
    await cluster.start("push", answers(), streams(token("a"), ERROR, DONE, gap=0.02))
    got = await cluster.post(STREAM)
    assert got.body == token("a") + ERROR


async def test_an_error_event_in_the_first_packet_is_the_last_one(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), streams(token("a") + ERROR + DONE))
    got = await cluster.post(STREAM)
    assert got.body == token("a") + ERROR


async def test_silence_in_mid_stream_is_bounded(cluster: Cluster) -> None:
    limits = FAST.__class__(connect=2, prefill=9, first_event=9, idle=0.3, health=2)
    script = streams(token("a"), end="hang")
    await cluster.start("push", answers(), script, timeouts=limits)
    async with asyncio.timeout(10):
        got = await cluster.post(STREAM)
    assert got.body.startswith(token("a"))
    assert b"[DONE]" not in got.body
    (error,) = errors_of(got.body)
    assert error["cause"] == "decode_timeout"
    async with asyncio.timeout(5):
        await cluster.decode[0].seen[0].disconnected.wait()


async def test_handoff_parameters_in_an_event_do_not_reach_the_client(
    cluster: Cluster,
) -> None:
    secret = {"choices": [{"text": "a"}], "kv_transfer_params": {"remote_host": "h"}}
    script = streams(event(secret), token("b"), event(secret), DONE, gap=0.02)
    await cluster.start("push", answers(), script)
    got = await cluster.post(STREAM)
    stripped = b'data: {"choices":[{"text":"a"}]}\n\n'
    assert got.body == stripped + token("b") + stripped + DONE


async def test_an_answer_of_another_form_passes_as_it_is(cluster: Cluster) -> None:
    await cluster.start("push", answers(), answers({"a": 1}))
    got = await cluster.post(STREAM)
    assert got.json == {"a": 1}
    assert got.headers["Content-Type"].startswith("application/json")


async def test_time_to_first_event_is_measured(cluster: Cluster) -> None:
    await cluster.start("push", answers(), streams(token("a"), DONE))
    await cluster.post(STREAM)
    await cluster.quiet()
    name = "pd_router_time_to_first_event_seconds_count"
    assert await cluster.metric(name, mode="push") == 1
    name = "pd_router_leg_seconds_count"
    assert await cluster.metric(name, leg="prefill", result="ok") == 1
    assert await cluster.metric(name, leg="decode", result="ok") == 1


async def test_a_client_that_stops_reading_ends_the_legs(cluster: Cluster) -> None:
    limits = FAST.__class__(connect=2, prefill=9, first_event=9, idle=0.5, health=2)
    script = streams(*[token("x" * 1_000_000)] * 40, DONE)
    await cluster.start("push", answers(), script, timeouts=limits)
    body = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", cluster.router.config.port, limit=1024
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    seen = await cluster.decode[0].request()
    async with asyncio.timeout(10):
        await seen.disconnected.wait()
    outcomes = "pd_router_requests_total"
    assert await cluster.metric(outcomes, outcome="client_stalled") == 1
    writer.close()
