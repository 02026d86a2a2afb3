# SPDX-License-Identifier: Apache-2.0
"""A second decode engine for a hand-off whose first one is lost, gone or too busy."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from pd_router import decode_legs
from pd_router.routing import RoutingSettings
from pd_router.workers import Worker
from router_backends import (
    DONE,
    ERROR,
    Cluster,
    Script,
    Seen,
    answers,
    hangs,
    in_turn,
    prefill_answer,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

STREAM = {"prompt": "p", "stream": True, "max_tokens": 50}
BODY = token("a") + DONE
OK_DECODE = streams(token("a"), DONE)
OK_PREFILL = answers(prefill_answer())
COUNT = "pd_router_rebinds_total"
MOVING = RoutingSettings(rebind_after=0.1)


def slow(seconds: float, script: Script) -> Script:
    async def run(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await script(seen)

    return run


def decoders(cluster: Cluster) -> list[Worker]:
    return [w for w in cluster.router.workers if w.role == "decode"]


def transfer_ids(cluster: Cluster) -> set[str]:
    engines = (*cluster.prefill, *cluster.decode)
    return {seen.params["transfer_id"] for e in engines for seen in e.seen}


def waiting(cluster: Cluster, number: int, more: int) -> None:
    """Pretend that a decode engine keeps so many more legs waiting."""
    decoders(cluster)[number].waiting += more


def nobody_waits(cluster: Cluster) -> bool:
    return all(worker.waiting == 0 for worker in cluster.router.workers)


LOST: list[Any] = [
    None,
    streams(b"data: {", end="abort"),
    answers({"error": {"message": "starting"}}, status=503),
]


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("lost", LOST)
async def test_a_lost_decode_engine_is_replaced_alone(
    cluster: Cluster, mode: str, lost: Script | None
) -> None:
    await cluster.start(mode, slow(0.3, OK_PREFILL), [lost, OK_DECODE])
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, BODY)
    # The prompt has been prefilled once, for one hand-off.
    assert len(cluster.prefill[0].seen) == 1
    assert len(transfer_ids(cluster)) == 1
    assert await cluster.metric(COUNT, reason="lost", winner="second") == 1
    assert await cluster.metric("pd_router_retries_total") == 1
    await cluster.quiet()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    "failing", [streams(ERROR, DONE), answers({"error": {"message": "x"}}, status=500)]
)
async def test_what_the_hand_off_may_have_failed_by_is_not_tried_elsewhere(
    cluster: Cluster, mode: str, failing: Script
) -> None:
    await cluster.start(mode, OK_PREFILL, [failing, OK_DECODE])
    assert (await cluster.post(STREAM)).status == 503
    assert cluster.decode[1].seen == []


async def test_no_tries_no_replacement(cluster: Cluster) -> None:
    await cluster.start("push", hangs(), [LOST[1], OK_DECODE], retries=0)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "decode_broken")
    await cluster.quiet()


async def test_a_busy_engine_gives_way_after_a_while(cluster: Cluster) -> None:
    await cluster.start(
        "push", slow(0.2, OK_PREFILL), [hangs(), OK_DECODE], routing=MOVING
    )
    asking = asyncio.create_task(cluster.post(STREAM))
    first = await cluster.decode[0].request()
    got = await asking
    assert (got.status, got.body) == (200, BODY)
    async with asyncio.timeout(5):
        await first.disconnected.wait()
    assert len(cluster.prefill[0].seen) == 1
    assert len(transfer_ids(cluster)) == 1
    assert cluster.decode[1].seen[0].params == first.params
    assert await cluster.metric(COUNT, reason="overloaded", winner="second") == 1
    await cluster.quiet()


async def test_nothing_moves_before_the_prompt_is_prefilled(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def prefill(seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await OK_PREFILL(seen)

    await cluster.start("push", prefill, [hangs(), OK_DECODE], routing=MOVING)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    await asyncio.sleep(0.4)
    assert cluster.decode[1].seen == []
    gate.set()
    assert (await asking).status == 200


async def test_an_engine_that_keeps_others_waiting_is_not_asked(
    cluster: Cluster,
) -> None:
    await cluster.start("push", OK_PREFILL, [hangs(), OK_DECODE], routing=MOVING)
    waiting(cluster, 1, 1)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    await asyncio.sleep(0.5)
    assert cluster.decode[1].seen == []
    # As soon as it has answered, it is asked.
    waiting(cluster, 1, -1)
    assert (await asking).status == 200
    assert len(cluster.decode[1].seen) == 1
    await cluster.quiet()
    assert nobody_waits(cluster)


async def test_whole_answers_do_not_count_as_waiting(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def second(seen: Seen) -> web.StreamResponse:
        if not seen.body.get("stream"):
            await gate.wait()
            return await answers()(seen)
        return await OK_DECODE(seen)

    await cluster.start("push", OK_PREFILL, [hangs(), second], routing=MOVING)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    whole = asyncio.create_task(cluster.post({**STREAM, "stream": False}))
    await cluster.decode[1].request()
    assert (await asking).status == 200
    assert not whole.done()
    gate.set()
    assert (await whole).status == 200
    await cluster.quiet()
    assert nobody_waits(cluster)


async def test_an_engine_that_had_a_request_taken_from_it_is_avoided_for_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_legs, "AVOID_SECONDS", 60.0)
    held = in_turn(hangs(), OK_DECODE)
    await cluster.start("push", OK_PREFILL, [held, OK_DECODE], routing=MOVING)
    assert (await cluster.post(STREAM)).status == 200
    for _ in range(3):
        assert (await cluster.post(STREAM)).status == 200
    assert len(cluster.decode[0].seen) == 1
    # Its turn comes when the while is over, and it is an engine like others again.
    decoders(cluster)[0].slow_until = 0.0
    assert (await cluster.post(STREAM)).status == 200
    assert len(cluster.decode[0].seen) == 2
    assert await cluster.metric(COUNT) == 1


async def test_an_engine_that_is_avoided_is_not_asked_either(cluster: Cluster) -> None:
    await cluster.start("push", OK_PREFILL, [hangs(), OK_DECODE], routing=MOVING)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    decoders(cluster)[1].slow_until = time.monotonic() + 60
    await asyncio.sleep(0.5)
    assert cluster.decode[1].seen == []
    decoders(cluster)[1].slow_until = 0.0
    assert (await asking).status == 200


async def test_where_all_are_to_be_avoided_all_are_chosen(cluster: Cluster) -> None:
    await cluster.start("push", OK_PREFILL, [OK_DECODE, OK_DECODE], routing=MOVING)
    for _ in range(2):
        for worker in decoders(cluster):
            worker.slow_until = time.monotonic() + 60
        assert (await cluster.post(STREAM)).status == 200
    assert [len(engine.seen) for engine in cluster.decode] == [1, 1]


async def test_the_first_engine_may_still_win(cluster: Cluster) -> None:
    await cluster.start(
        "push", OK_PREFILL, [slow(0.5, OK_DECODE), hangs()], routing=MOVING
    )
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    second = await cluster.decode[1].request()
    got = await asking
    assert (got.status, got.body) == (200, BODY)
    async with asyncio.timeout(5):
        await second.disconnected.wait()
    assert await cluster.metric(COUNT, reason="overloaded", winner="first") == 1
    await cluster.quiet()


@pytest.mark.parametrize(
    "failing",
    [
        streams(ERROR, DONE),
        answers({"error": {"message": "full"}}, status=429),
        LOST[1],
    ],
)
async def test_the_second_engines_failure_leaves_the_first_one_alone(
    cluster: Cluster, failing: Script
) -> None:
    await cluster.start(
        "push", OK_PREFILL, [slow(0.6, OK_DECODE), failing], routing=MOVING
    )
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    got = await asking
    assert (got.status, got.body) == (200, BODY)
    assert len(cluster.decode[1].seen) == 1
    # It may have been told that the first one has got the KV already.
    shown = (await cluster.get("/status")).json["workers"]
    breaking = failing is LOST[1]
    assert [w["breaker"]["failures"] for w in shown] == [0, 0, int(breaking)]
    await cluster.quiet()


async def test_an_engine_that_fails_its_health_checks_is_left_at_once(
    cluster: Cluster,
) -> None:
    await cluster.start("push", hangs(), [hangs(), OK_DECODE], routing=MOVING)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    decoders(cluster)[0].mark_down("for the test")
    assert (await asking).status == 200
    assert await cluster.metric(COUNT, reason="unhealthy", winner="second") == 1


async def test_where_both_have_failed_the_whole_is_tried_again(
    cluster: Cluster,
) -> None:
    # The first one may have taken the hand-off with it.
    dying = slow(0.2, LOST[1])
    refused = in_turn(streams(ERROR, DONE), OK_DECODE)
    await cluster.start("push", OK_PREFILL, [dying, refused], retries=2)
    assert (await cluster.post(STREAM)).status == 200
    assert len(cluster.prefill[0].seen) == 2
    assert len(transfer_ids(cluster)) == 2


async def test_several_answers_stay_together(cluster: Cluster) -> None:
    await cluster.start(
        "push", OK_PREFILL, [slow(0.5, OK_DECODE), OK_DECODE], routing=MOVING
    )
    asking = asyncio.create_task(cluster.post({**STREAM, "n": 2}))
    await cluster.decode[0].request()
    assert (await asking).status == 200
    assert cluster.decode[1].seen == []


async def test_off_by_default(cluster: Cluster) -> None:
    await cluster.start("push", OK_PREFILL, [slow(0.5, OK_DECODE), OK_DECODE])
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[0].request()
    assert (await asking).status == 200
    assert cluster.decode[1].seen == []


async def test_a_whole_answer_may_take_its_time(cluster: Cluster) -> None:
    # It may have been generated for a while; the router cannot see that.
    await cluster.start(
        "push", OK_PREFILL, [slow(0.5, answers()), answers()], routing=MOVING
    )
    asking = asyncio.create_task(cluster.post({**STREAM, "stream": False}))
    await cluster.decode[0].request()
    assert (await asking).status == 200
    assert cluster.decode[1].seen == []


async def test_a_client_that_leaves_ends_both_decode_legs(cluster: Cluster) -> None:
    await cluster.start("push", OK_PREFILL, [hangs(), hangs()], routing=MOVING)
    asking = asyncio.create_task(cluster.post(STREAM))
    first = await cluster.decode[0].request()
    second = await cluster.decode[1].request()
    asking.cancel()
    async with asyncio.timeout(5):
        await first.disconnected.wait()
        await second.disconnected.wait()
    assert await cluster.metric(COUNT, reason="overloaded", winner="none") == 1
    await cluster.quiet()


async def test_answers_at_the_same_moment_are_one_answer(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def together(seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await OK_DECODE(seen)

    await cluster.start("push", OK_PREFILL, [together, together], routing=MOVING)
    for _ in range(5):
        gate.clear()
        seen = [len(engine.seen) for engine in cluster.decode]
        asking = asyncio.create_task(cluster.post(STREAM))
        async with asyncio.timeout(5):
            while True:
                now = [len(engine.seen) for engine in cluster.decode]
                if sum(now) == sum(seen) + 1:
                    first = 0 if now[0] > seen[0] else 1
                    await cluster.decode[1 - first].request(seen[1 - first])
                    break
                await asyncio.sleep(0.01)
        gate.set()
        got = await asking
        assert (got.status, got.body) == (200, BODY)
        await cluster.quiet()
