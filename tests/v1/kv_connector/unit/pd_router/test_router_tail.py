# SPDX-License-Identifier: Apache-2.0
"""Who waits where others fill a decode engine past the router, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from pd_router.config import Role
from pd_router.routing import RoutingSettings
from router_backends import (
    COMPLETIONS,
    DONE,
    ERROR,
    Cluster,
    Engine,
    Got,
    Script,
    Seen,
    answers,
    hangs,
    prefill_answer,
    streams,
    token,
)
from test_router_side_channel import Told, Unaware, serving

pytestmark = pytest.mark.asyncio

STREAM = {"prompt": "p", "stream": True, "max_tokens": 50}
HOLDER = {**STREAM, "prompt": "holds its slot"}
BODY = token("a") + DONE
ANSWERS = streams(token("a"), DONE)
MOVING = RoutingSettings(rebind_after=0.1)
SLOTS = 2
REQUESTS = 8
REBINDS = "pd_router_rebinds_total"


class Slots:
    """An engine that runs two at a time; some of them until they are let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self._free = asyncio.Semaphore(SLOTS)

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        async with self._free:
            if seen.body["prompt"] == HOLDER["prompt"]:
                await self.let_go.wait()
            return await ANSWERS(seen)


async def start(cluster: Cluster, routing: RoutingSettings) -> tuple[Slots, Slots]:
    slots = Slots(), Slots()
    await cluster.start("push", answers(prefill_answer()), slots, routing=routing)
    return slots


async def hold(engine: Engine, session: aiohttp.ClientSession) -> None:
    """Take a slot, past the router."""
    async with session.post(f"{engine.address.url}{COMPLETIONS}", json=HOLDER) as reply:
        await reply.read()


async def ended_before(
    cluster: Cluster, slots: Slots, expected: int
) -> tuple[int, list[Got]]:
    """Eight requests while others hold the first engine's slots.

    Returns how many have ended before those are let go, once it is as many as expected
    and has stayed so for a while, and all answers.
    """
    async with aiohttp.ClientSession() as session:
        holders = [
            asyncio.create_task(hold(cluster.decode[0], session)) for _ in range(SLOTS)
        ]
        await cluster.decode[0].request(SLOTS - 1)
        asking = [asyncio.create_task(cluster.post(STREAM)) for _ in range(REQUESTS)]
        async with asyncio.timeout(10):
            while sum(task.done() for task in asking) < expected:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        ended = sum(task.done() for task in asking)
        slots.let_go.set()
        got = await asyncio.gather(*asking)
        await asyncio.gather(*holders)
    return ended, got


async def test_without_the_option_half_of_the_requests_wait_for_others(
    cluster: Cluster,
) -> None:
    first, _ = await start(cluster, RoutingSettings())
    ended, got = await ended_before(cluster, first, REQUESTS // 2)
    assert ended == REQUESTS // 2
    assert [(one.status, one.body) for one in got] == [(200, BODY)] * REQUESTS


async def test_with_the_option_none_waits_for_others(cluster: Cluster) -> None:
    first, _ = await start(cluster, MOVING)
    ended, got = await ended_before(cluster, first, REQUESTS)
    assert ended == REQUESTS
    assert [(one.status, one.body) for one in got] == [(200, BODY)] * REQUESTS
    moved = await cluster.metric(REBINDS, reason="overloaded", winner="second")
    assert moved == await cluster.metric(REBINDS) == REQUESTS // 2
    # Each prompt has been prefilled once.
    assert len(cluster.prefill[0].seen) == REQUESTS
    await cluster.quiet()
    assert [worker.waiting for worker in cluster.router.workers] == [0, 0, 0]


@pytest.mark.parametrize("role", list(Role))
async def test_kv_that_has_gone_to_the_first_engine_is_asked_for_by_no_other(
    cluster: Cluster, role: Role
) -> None:
    gate = asyncio.Event()

    async def queued(seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await ANSWERS(seen)

    has_it = Told("sender", "served")
    unaware = Unaware()
    with serving(has_it) as known, serving(unaware) as unknown:
        await cluster.start(
            "push", answers(prefill_answer()), [queued, ANSWERS], routing=MOVING
        )
        for worker in cluster.router.workers:
            address = known if worker.role is role else unknown
            worker.spec = replace(worker.spec, report_address=address)
        asking = asyncio.create_task(cluster.post(STREAM))
        await until(lambda: bool(has_it.asked))
        await asyncio.sleep(0.5)
        assert cluster.decode[1].seen == []
        gate.set()
        assert (await asking).status == 200
    # Both are asked, once: what is over does not begin again.
    assert len(has_it.asked) == len(unaware.asked) == 1
    assert await cluster.metric(REBINDS) == 0


async def test_kv_that_is_still_at_prefill_can_be_asked_for(cluster: Cluster) -> None:
    unaware = Unaware()
    with serving(unaware) as address:
        await cluster.start(
            "push", answers(prefill_answer()), [hangs(), ANSWERS], routing=MOVING
        )
        for worker in cluster.router.workers:
            worker.spec = replace(worker.spec, report_address=address)
        assert (await cluster.post(STREAM)).status == 200
    assert len(unaware.asked) == 2
    assert await cluster.metric(REBINDS, winner="second") == 1


async def test_an_engine_that_does_not_say_is_not_waited_for(cluster: Cluster) -> None:
    refused: Script = streams(ERROR, DONE)
    gate = asyncio.Event()

    async def queued(seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return await ANSWERS(seen)

    await cluster.start(
        "push", answers(prefill_answer()), [queued, refused], routing=MOVING
    )
    for worker in cluster.router.workers:
        # Nobody listens there.
        worker.spec = replace(worker.spec, report_address=worker.address)
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.decode[1].request()
    await asyncio.sleep(0.1)
    gate.set()
    assert (await asking).status == 200
    # The refusal is no failure of anybody's.
    shown = (await cluster.get("/status")).json["workers"]
    assert [w["breaker"]["failures"] for w in shown] == [0, 0, 0]
    assert await cluster.metric(REBINDS, winner="first") == 1


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)
