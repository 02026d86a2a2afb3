# SPDX-License-Identifier: Apache-2.0
"""A prefill leg that is refused or lost for a passing reason, and what follows."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from pd_router.breaker import BreakerSettings
from pd_router.routing import RoutingSettings
from router_backends import (
    DONE,
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
WORKS = answers(prefill_answer())


def refusing(status: int, after: str | None = None) -> Script:
    headers = None if after is None else {"Retry-After": after}
    return answers({"error": {"message": "busy"}}, status=status, headers=headers)


LOST = streams(b"x", end="abort", content_type="application/json")


class Waiting:
    """A decode engine that answers a hand-off once its prompt has been prefilled."""

    def __init__(self) -> None:
        self._prefilled: dict[str, asyncio.Event] = {}

    def prefill(self, script: Script) -> Script:
        async def run(seen: Seen) -> web.StreamResponse:
            response = await script(seen)
            if response.status == 200:
                self._event(seen).set()
            return response

        return run

    async def decode(self, seen: Seen) -> web.StreamResponse:
        await self._event(seen).wait()
        return await streams(token("a"), DONE)(seen)

    def _event(self, seen: Seen) -> asyncio.Event:
        return self._prefilled.setdefault(seen.params["transfer_id"], asyncio.Event())


@pytest.mark.parametrize("failing", [refusing(502), refusing(503), refusing(504), LOST])
async def test_push_sends_both_legs_again_to_another_prefill(
    cluster: Cluster, failing: Script
) -> None:
    stage = Waiting()
    await cluster.start("push", [failing, stage.prefill(WORKS)], stage.decode)
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, token("a") + DONE)
    first, second = cluster.decode[0].seen
    # Decode would look for the first hand-off at the wrong engine for ever.
    assert first.params["transfer_id"] != second.params["transfer_id"]
    assert [first.params["remote_port"], second.params["remote_port"]] == [5600, 5601]
    await first.disconnected.wait()
    assert len(cluster.prefill[0].seen) == 1
    assert await cluster.metric("pd_router_retries_total") == 1
    await cluster.quiet()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("status", [502, 503, 504])
async def test_the_only_prefill_is_asked_again_alone(
    cluster: Cluster, mode: str, status: int
) -> None:
    stage = Waiting()
    script = stage.prefill(in_turn(refusing(status, "0"), WORKS))
    await cluster.start(mode, script, stage.decode)
    got = await cluster.post(STREAM)
    assert (got.status, got.body) == (200, token("a") + DONE)
    ids = [seen.params["transfer_id"] for seen in cluster.prefill[0].seen]
    assert len(ids) == 2
    # The decode leg has not been disturbed.
    (decode,) = cluster.decode[0].seen
    assert {decode.params["transfer_id"]} == set(ids)
    assert await cluster.metric("pd_router_retries_total", cause="prefill_status") == 1
    failed = "pd_router_handoff_failures_total"
    assert await cluster.metric(failed, cause="prefill_status") == 1
    await cluster.quiet()


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_tries_are_counted_over_all_kinds(cluster: Cluster, mode: str) -> None:
    await cluster.start(mode, refusing(503, "0"), hangs(), retries=2)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "prefill_status")
    assert len(cluster.prefill[0].seen) == 3
    await cluster.quiet()


@pytest.mark.parametrize("after", ["Wed, 21 Oct 2015 07:28:00 GMT", "-3", None])
async def test_an_odd_retry_after_is_survived(
    cluster: Cluster, after: str | None
) -> None:
    stage = Waiting()
    script = stage.prefill(in_turn(refusing(503, after), WORKS))
    await cluster.start("push", script, stage.decode)
    assert (await cluster.post(STREAM)).status == 200


async def test_an_open_breaker_ends_the_tries(cluster: Cluster) -> None:
    routing = RoutingSettings(breaker=BreakerSettings(2, 60.0))
    await cluster.start("push", refusing(503, "0"), hangs(), retries=9, routing=routing)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "prefill_status")
    assert len(cluster.prefill[0].seen) == 2


async def test_a_decode_leg_that_fails_meanwhile_ends_the_attempt(
    cluster: Cluster,
) -> None:
    async def decode(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await answers({"error": {"message": "x"}}, status=500)(seen)

    await cluster.start("push", refusing(503, "2"), decode)
    got = await cluster.post(STREAM)
    assert (got.status, got.error["cause"]) == (503, "decode_status")
    assert len(cluster.prefill[0].seen) == 1
    await cluster.quiet()


async def test_a_client_that_leaves_ends_the_pause(cluster: Cluster) -> None:
    await cluster.start("push", refusing(503, "2"), hangs())
    asking = asyncio.create_task(cluster.post(STREAM))
    await cluster.prefill[0].request()
    await asyncio.sleep(0.1)
    asking.cancel()
    await cluster.quiet()
    assert len(cluster.prefill[0].seen) == 1
