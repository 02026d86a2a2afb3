# SPDX-License-Identifier: Apache-2.0
"""Push: both legs together, and what a failure of either does."""

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from router_backends import (
    CHAT,
    DONE,
    ERROR,
    FAST,
    Cluster,
    Script,
    answers,
    chat_chunk,
    completion,
    event,
    hangs,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

STREAM = {"prompt": "p", "stream": True, "max_tokens": 50}
REFUSAL = {"error": {"message": "bad field", "type": "BadRequestError", "code": 400}}


def is_retryable(error: dict[str, Any], transfer_id: str | None) -> bool:
    return bool(
        error["type"] == "kv_handoff_failed"
        and error["retryable"] is True
        and error["transfer_id"] == transfer_id
        and error["message"]
    )


async def test_both_legs_go_out_together_with_one_transfer_id(
    cluster: Cluster,
) -> None:
    await cluster.start("push", hangs(), hangs())
    body = {"prompt": "p", "n": 3, "max_tokens": 9, "stop": ["x"], "odd": {"a": [1.5]}}
    asking = asyncio.create_task(cluster.post(body))
    prefill = await cluster.prefill[0].request()
    decode = await cluster.decode[0].request()
    transfer_id = prefill.params["transfer_id"]
    assert len(transfer_id) == 32
    assert prefill.params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "num_receivers": 3,
    }
    assert (prefill.body["max_tokens"], prefill.body["n"]) == (1, 1)
    assert decode.params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": "engine-p",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
    }
    del decode.body["kv_transfer_params"]
    assert decode.body == body
    asking.cancel()


async def test_transfer_ids_and_leg_request_ids_are_never_used_twice(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers())
    for _ in range(3):
        await cluster.post({"prompt": "p"}, headers={"X-Request-Id": "mine"})
    legs = cluster.prefill[0].seen + cluster.decode[0].seen
    assert len({leg.params["transfer_id"] for leg in legs}) == 3
    assert len({leg.headers["x-request-id"] for leg in legs}) == 3
    for prefill, decode in zip(
        cluster.prefill[0].seen, cluster.decode[0].seen, strict=True
    ):
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
        assert prefill.headers["x-request-id"].startswith("mine-")


async def test_a_whole_answer_keeps_status_body_and_content_type(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers(completion("yes")))
    got = await cluster.post({"prompt": "p"}, headers={"X-Request-Id": "mine"})
    assert got.status == 200
    assert got.json == completion("yes")
    assert got.headers["Content-Type"].startswith("application/json")
    assert got.headers["X-Request-Id"] == "mine"
    await cluster.quiet()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("decode", [hangs(), streams(end="hang")])
async def test_failed_prefill_ends_decode_and_reaches_the_client(
    cluster: Cluster, stream: bool, decode: Script
) -> None:
    await cluster.start(
        "push", answers({"error": {"message": "oom"}}, status=500), decode
    )
    got = await cluster.post({"prompt": "p", "stream": stream})
    seen = await cluster.decode[0].request()
    assert got.status == 503
    assert got.headers["Content-Type"] == "application/json"
    assert int(got.headers["Retry-After"]) > 0
    assert is_retryable(got.error, seen.params["transfer_id"])
    assert got.error["cause"] == "prefill_status"
    assert "oom" in got.error["message"]
    async with asyncio.timeout(5):
        await seen.disconnected.wait()
    await cluster.quiet()


async def test_prefills_refusal_is_what_the_client_gets(cluster: Cluster) -> None:
    await cluster.start("push", answers(REFUSAL, status=422), hangs())
    got = await cluster.post(STREAM)
    assert (got.status, got.json) == (422, REFUSAL)
    seen = await cluster.decode[0].request()
    async with asyncio.timeout(5):
        await seen.disconnected.wait()


async def test_decodes_refusal_passes_and_ends_prefill(cluster: Cluster) -> None:
    script = answers(REFUSAL, status=400, headers={"X-Odd": "kept"})
    await cluster.start("push", hangs(), script)
    got = await cluster.post(STREAM)
    assert (got.status, got.json) == (400, REFUSAL)
    assert got.headers["X-Odd"] == "kept"
    seen = await cluster.prefill[0].request()
    async with asyncio.timeout(5):
        await seen.disconnected.wait()


@pytest.mark.parametrize(
    ("decode", "cause"),
    [
        (answers({"error": {"message": "x"}}, status=500), "decode_status"),
        (streams(ERROR, DONE), "decode_error_event"),
        (streams(b": ping\n\n", ERROR, DONE, gap=0.05), "decode_error_event"),
        (streams(), "decode_broken"),
        (streams(b"data: {", end="abort"), "decode_broken"),
    ],
)
async def test_a_handoff_that_fails_on_decode_is_a_503(
    cluster: Cluster, decode: Script, cause: str
) -> None:
    await cluster.start("push", answers(), decode)
    got = await cluster.post(STREAM)
    seen = await cluster.decode[0].request()
    assert got.status == 503
    assert got.headers["Content-Type"] == "application/json"
    assert is_retryable(got.error, seen.params["transfer_id"])
    assert got.error["cause"] == cause
    assert (
        await cluster.metric(
            "pd_router_handoff_failures_total", mode="push", cause=cause
        )
        == 1
    )


async def test_a_chat_that_fails_after_its_role_chunk_is_a_503(
    cluster: Cluster,
) -> None:
    role = chat_chunk({"role": "assistant", "content": ""})
    await cluster.start("push", answers(), streams(role, ERROR, DONE, gap=0.05))
    got = await cluster.post({"messages": [], "stream": True}, CHAT)
    assert got.status == 503
    assert got.error["cause"] == "decode_error_event"


async def test_a_first_error_event_that_blames_the_request_is_no_handoff_failure(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), streams(event(REFUSAL), DONE))
    got = await cluster.post(STREAM)
    assert (got.status, got.json) == (400, REFUSAL)


async def test_headers_wait_for_the_first_event(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def script(seen: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(b": keep-alive\n\n")
        await gate.wait()
        await response.write(token("a") + DONE)
        return response

    await cluster.start("push", answers(), script)
    asking = asyncio.create_task(cluster.client.post("/v1/completions", json=STREAM))
    await cluster.decode[0].request()
    await asyncio.sleep(0.3)
    assert not asking.done()
    gate.set()
    async with await asking as response:
        assert response.status == 200
        assert await response.read() == b": keep-alive\n\n" + token("a") + DONE


@pytest.mark.parametrize("stream", [True, False])
async def test_waits_are_bounded(cluster: Cluster, stream: bool) -> None:
    limits = FAST.__class__(connect=2, prefill=20, first_event=0.3, idle=0.1, health=2)
    await cluster.start("push", hangs(), hangs(), timeouts=limits)
    began = time.monotonic()
    got = await cluster.post({"prompt": "p", "stream": stream})
    assert time.monotonic() - began < 10
    seen = await cluster.decode[0].request()
    assert got.status == 504
    assert is_retryable(got.error, seen.params["transfer_id"])
    assert got.error["cause"] == "decode_timeout"
    async with asyncio.timeout(5):
        await seen.disconnected.wait()
        await (await cluster.prefill[0].request()).disconnected.wait()


async def test_the_prefill_leg_is_bounded(cluster: Cluster) -> None:
    limits = FAST.__class__(connect=2, prefill=0.3, first_event=20, idle=20, health=2)
    await cluster.start("push", hangs(), hangs(), timeouts=limits)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (504, "prefill_timeout")
    seen = await cluster.decode[0].request()
    async with asyncio.timeout(5):
        await seen.disconnected.wait()


@pytest.mark.parametrize("decode", [hangs(), streams(token("a"), end="hang")])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_both_legs(
    cluster: Cluster, decode: Script, stream: bool
) -> None:
    await cluster.start("push", hangs(), decode)
    asking = asyncio.create_task(cluster.post({"prompt": "p", "stream": stream}))
    prefill = await cluster.prefill[0].request()
    seen = await cluster.decode[0].request()
    await asyncio.sleep(0.1)
    assert not prefill.disconnected.is_set()
    asking.cancel()
    async with asyncio.timeout(5):
        await prefill.disconnected.wait()
        await seen.disconnected.wait()
    await cluster.quiet()
    assert (
        await cluster.metric("pd_router_requests_total", outcome="client_disconnect")
        == 1
    )


async def test_a_slow_prefill_answer_does_not_hold_up_the_stream(
    cluster: Cluster,
) -> None:
    # The KV cache can be there before prefill's HTTP answer is.
    await cluster.start("push", hangs(), streams(token("a"), DONE))
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, token("a") + DONE)
    seen = await cluster.prefill[0].request()
    async with asyncio.timeout(5):
        await seen.disconnected.wait()
    await cluster.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_its_answer_does_not_cut_prefill_off(
    cluster: Cluster, stream: bool
) -> None:
    decode = streams(token("a"), DONE) if stream else answers()
    await cluster.start("push", answers(after=0.3), decode)
    got = await cluster.post({"prompt": "p", "stream": stream})
    assert got.status == 200
    seen = await cluster.prefill[0].request()
    async with asyncio.timeout(5):
        await seen.finished.wait()
    assert not seen.disconnected.is_set()
    await cluster.quiet()
    assert await cluster.metric("pd_router_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_an_engine_that_cannot_be_reached_is_replaced_once(
    cluster: Cluster, dead: str
) -> None:
    scripts = {"prefill": [answers()], "decode": [streams(token("a"), DONE)]}
    both: dict[str, Any] = {**scripts, dead: [None, *scripts[dead]]}
    await cluster.start("push", both["prefill"], both["decode"])
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, token("a") + DONE)
    # The other role saw both attempts, under two transfer ids.
    engine = (cluster.decode if dead == "prefill" else cluster.prefill)[0]
    ids = [seen.params["transfer_id"] for seen in engine.seen]
    assert len(ids) == len(set(ids))
    live = (cluster.prefill if dead == "prefill" else cluster.decode)[1]
    assert live.seen[0].params["transfer_id"] == ids[-1]
    assert await cluster.metric("pd_router_retries_total", cause=f"{dead}_connect") == 1
    # It is out of the choice now.
    assert (await cluster.post(STREAM)).status == 200
    assert await cluster.metric("pd_router_retries_total") == 1


async def test_no_second_attempt_where_the_request_may_be_at_fault(
    cluster: Cluster,
) -> None:
    failing = answers({"error": {"message": "x"}}, status=500)
    await cluster.start("push", [failing, failing], hangs())
    assert (await cluster.post(STREAM)).status == 503
    assert sum(len(engine.seen) for engine in cluster.prefill) == 1


async def test_when_nobody_else_is_left_the_failure_is_told(cluster: Cluster) -> None:
    await cluster.start("push", [None], answers())
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "prefill_connect")
    got = await cluster.post(STREAM)
    assert (got.status, got.error["type"]) == (503, "no_worker")
    assert got.error["retryable"] is True


async def test_load_is_spread_over_both_roles(cluster: Cluster) -> None:
    slow = answers(completion("a"), after=0.3)
    await cluster.start("push", [slow, slow], [slow, slow, slow])
    await asyncio.gather(*(cluster.post({"prompt": "p"}) for _ in range(6)))
    assert [len(e.seen) for e in cluster.prefill] == [3, 3]
    assert [len(e.seen) for e in cluster.decode] == [2, 2, 2]
    by_port = {
        seen.params["transfer_id"]: 5600 + index
        for index, engine in enumerate(cluster.prefill)
        for seen in engine.seen
    }
    for engine in cluster.decode:
        for seen in engine.seen:
            # Decode is pointed at the very prefill that has the other leg.
            assert seen.params["remote_port"] == by_port[seen.params["transfer_id"]]


async def test_handoff_parameters_do_not_reach_the_client(cluster: Cluster) -> None:
    answer = {**completion("a"), "kv_transfer_params": {"remote_block_ids": [7]}}
    await cluster.start("push", answers(answer), answers(answer))
    got = await cluster.post({"prompt": "p"})
    assert got.json == completion("a")


async def test_a_request_that_needs_prompt_logprobs_uses_no_handoff(
    cluster: Cluster,
) -> None:
    await cluster.start("push", answers(), answers())
    body = {"prompt": ["a", "b"], "echo": True, "logprobs": 1}
    got = await cluster.post(body)
    assert got.status == 200
    assert cluster.prefill[0].seen == []
    assert cluster.decode[0].seen[0].body == body
    assert json.loads(got.body) == completion("hi")


async def test_a_prefill_worker_is_free_while_decode_streams(cluster: Cluster) -> None:
    await cluster.start("push", answers(), streams(token("a"), end="hang"))
    asking = asyncio.create_task(cluster.post(STREAM))
    prefill = await cluster.prefill[0].request()
    await cluster.decode[0].request()
    async with asyncio.timeout(5):
        await prefill.finished.wait()
        while [w.outstanding for w in cluster.router.workers] != [0, 1]:
            await asyncio.sleep(0.01)
    asking.cancel()
