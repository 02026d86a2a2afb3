# SPDX-License-Identifier: Apache-2.0
"""Pull: prefill first, then a choice of decode, then the read."""

import asyncio
from typing import Any

import pytest

from router_backends import (
    CHAT,
    DONE,
    ERROR,
    FAST,
    Cluster,
    Script,
    answers,
    completion,
    hangs,
    prefill_answer,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

STREAM = {"prompt": "p", "stream": True, "max_tokens": 50, "n": 2}
OK_PREFILL = answers(prefill_answer())
OK_DECODE = streams(token("a"), DONE)


async def test_decode_gets_what_prefill_answered(cluster: Cluster) -> None:
    await cluster.start("pull", OK_PREFILL, OK_DECODE)
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, token("a") + DONE)
    prefill = cluster.prefill[0].seen[0]
    decode = cluster.decode[0].seen[0]
    transfer_id = prefill.params["transfer_id"]
    assert prefill.params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "num_receivers": 2,
    }
    assert prefill.body["stream"] is False
    assert decode.params == {
        **prefill_answer()["kv_transfer_params"],
        "transfer_id": transfer_id,
        "num_receivers": 2,
    }
    del decode.body["kv_transfer_params"]
    assert decode.body == STREAM
    await cluster.quiet()


async def test_decode_is_chosen_after_prefill_has_answered(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def prefill(seen: Any) -> Any:
        await gate.wait()
        return await OK_PREFILL(seen)

    await cluster.start("pull", prefill, [OK_DECODE, OK_DECODE])
    first = next(w for w in cluster.router.workers if w.role == "decode")
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.prefill[0].request()
    # The one that would have been chosen before is gone by now.
    first.mark_down("for the test")
    gate.set()
    assert (await asking).status == 200
    assert [len(e.seen) for e in cluster.decode] == [0, 1]


async def test_chat_goes_the_same_way(cluster: Cluster) -> None:
    await cluster.start("pull", OK_PREFILL, answers(completion("a")))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    got = await cluster.post(body, CHAT)
    assert got.status == 200
    assert cluster.prefill[0].seen[0].path == CHAT
    assert cluster.prefill[0].seen[0].body["messages"] == body["messages"]
    assert cluster.decode[0].seen[0].body["max_tokens"] == 7


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_prefill_is_tried_again_elsewhere(cluster: Cluster, status: int) -> None:
    failing = answers({"error": {"message": "busy"}}, status=status)
    await cluster.start("pull", [failing, OK_PREFILL], OK_DECODE)
    assert (await cluster.post(STREAM)).status == 200
    first, second = (e.seen[0].params["transfer_id"] for e in cluster.prefill)
    assert first != second
    assert cluster.decode[0].seen[0].params["transfer_id"] == second
    assert await cluster.metric("pd_router_retries_total", cause="prefill_status") == 1


async def test_a_dead_prefill_is_replaced(cluster: Cluster) -> None:
    await cluster.start("pull", [None, OK_PREFILL], OK_DECODE)
    assert (await cluster.post(STREAM)).status == 200


async def test_a_prefill_that_dies_is_replaced(cluster: Cluster) -> None:
    dying = streams(b"x", end="abort", content_type="application/json")
    await cluster.start("pull", [dying, OK_PREFILL], OK_DECODE)
    assert (await cluster.post(STREAM)).status == 200
    assert await cluster.metric("pd_router_retries_total", cause="prefill_broken") == 1


@pytest.mark.parametrize("status", [500, 503])
async def test_attempts_are_bounded(cluster: Cluster, status: int) -> None:
    failing = answers({"error": {"message": "x"}}, status=status)
    await cluster.start("pull", [failing] * 4, OK_DECODE, retries=2)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "prefill_status")
    attempts = [e.seen[0] for e in cluster.prefill if e.seen]
    assert len(attempts) == (1 if status == 500 else 3)
    assert got.error["transfer_id"] == attempts[-1].params["transfer_id"]
    assert cluster.decode[0].seen == []


async def test_a_refused_prefill_is_not_tried_again(cluster: Cluster) -> None:
    refusal = {"error": {"message": "too long", "code": 400}}
    failing = answers(refusal, status=400)
    await cluster.start("pull", [failing, failing], OK_DECODE)
    got = await cluster.post(STREAM)
    assert (got.status, got.json) == (400, refusal)
    assert sum(len(e.seen) for e in cluster.prefill) == 1
    assert cluster.decode[0].seen == []


async def test_a_prefill_that_never_answers_is_a_504(cluster: Cluster) -> None:
    limits = FAST.__class__(connect=2, prefill=0.3, first_event=20, idle=20, health=2)
    await cluster.start("pull", hangs(), OK_DECODE, timeouts=limits)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (504, "prefill_timeout")
    assert got.error["retryable"] is True
    seen = await cluster.prefill[0].request()
    assert got.error["transfer_id"] == seen.params["transfer_id"]
    async with asyncio.timeout(5):
        await seen.disconnected.wait()


@pytest.mark.parametrize(
    ("decode", "status", "cause"),
    [
        (streams(ERROR, DONE), 503, "decode_error_event"),
        (answers({"error": {"message": "x"}}, status=500), 503, "decode_status"),
        (None, 503, "decode_connect"),
        (hangs(), 504, "decode_timeout"),
    ],
)
async def test_a_read_that_fails_is_told_before_the_stream(
    cluster: Cluster, decode: Script | None, status: int, cause: str
) -> None:
    limits = FAST.__class__(connect=2, prefill=9, first_event=0.5, idle=9, health=2)
    await cluster.start("pull", OK_PREFILL, [decode], timeouts=limits)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (status, cause)
    seen = cluster.prefill[0].seen[0]
    assert got.error["transfer_id"] == seen.params["transfer_id"]
    assert len(cluster.prefill[0].seen) == 1


@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_running_leg(
    cluster: Cluster, phase: str
) -> None:
    prefill = hangs() if phase == "prefill" else OK_PREFILL
    decode = hangs() if phase == "decode" else streams(token("a"), end="hang")
    await cluster.start("pull", prefill, decode)
    asking = asyncio.create_task(cluster.post(STREAM))
    engine = cluster.prefill[0] if phase == "prefill" else cluster.decode[0]
    seen = await engine.request()
    await asyncio.sleep(0.1)
    asking.cancel()
    async with asyncio.timeout(5):
        await seen.disconnected.wait()
    await cluster.quiet()


async def test_without_coordinates_decode_computes_the_prompt(
    cluster: Cluster,
) -> None:
    await cluster.start("pull", answers(completion("x")), OK_DECODE)
    assert (await cluster.post(STREAM)).status == 200
    assert cluster.decode[0].seen[0].body == STREAM
    assert (
        await cluster.metric(
            "pd_router_local_prefills_total", reason="no_params_from_prefill"
        )
        == 1
    )


async def test_a_prefill_worker_is_free_while_decode_streams(cluster: Cluster) -> None:
    await cluster.start("pull", OK_PREFILL, streams(token("a"), end="hang"))
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    loads = {str(w.role): w.outstanding for w in cluster.router.workers}
    assert loads == {"prefill": 0, "decode": 1}
    asking.cancel()


async def test_nothing_is_prefilled_for_nobody(cluster: Cluster) -> None:
    await cluster.start("pull", OK_PREFILL, OK_DECODE)
    next(w for w in cluster.router.workers if w.role == "decode").mark_down("gone")
    got = await cluster.post(STREAM)
    assert (got.status, got.error["type"]) == (503, "no_worker")
    assert cluster.prefill[0].seen == []
