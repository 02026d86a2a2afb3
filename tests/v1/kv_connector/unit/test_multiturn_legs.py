# SPDX-License-Identifier: Apache-2.0
"""How the multi-turn benchmark sends legs and reads what comes back."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from bench_requests import TurnError, new_session
from multiturn_legs import DirectLegs, Endpoint, RoutedLegs
from multiturn_run import reset

Body = dict[str, Any]
TIMEOUT_S = 20.0
ANSWER = [7, 8, 9]


class Server:
    """One HTTP server in the place of an engine or a router."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.deleted: list[str] = []
        self.hung_up = asyncio.Event()
        self.reply: Body = {
            "usage": {
                "prompt_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
            "metrics": {"time_to_first_token_ms": 12.0},
            "kv_transfer_params": {"remote_host": "p", "remote_request_id": "r"},
        }
        self.status = 200
        self.events: list[Body] = [
            {"choices": [{"token_ids": []}]},
            {"choices": [{"token_ids": [7]}]},
            {"choices": [{"token_ids": [8, 9]}]},
        ]
        self.hangs = False
        self.resets = [True]
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_delete("/conversations/{name}", self._delete)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.hangs:
            try:
                await asyncio.sleep(TIMEOUT_S)
            except asyncio.CancelledError:
                self.hung_up.set()
                raise
        if self.status != 200 or not body.get("stream"):
            return web.json_response(self.reply, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _reset(self, _request: web.Request) -> web.Response:
        if not self.resets:
            return web.json_response({}, status=404)
        success = self.resets[0] if len(self.resets) == 1 else self.resets.pop(0)
        return web.json_response({"success": success})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["name"])
        return web.json_response({}, status=self.status)


NewServer = Callable[[], Awaitable[Server]]


@pytest_asyncio.fixture
async def new_server() -> AsyncIterator[NewServer]:
    made: list[Server] = []

    async def new() -> Server:
        server = Server()
        await server.start()
        made.append(server)
        return server

    yield new
    for server in made:
        await server.stop()


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session(TIMEOUT_S) as made:
        yield made


class Engines:
    """Two servers, and legs that go to them."""

    def __init__(
        self, session: aiohttp.ClientSession, prefill: Server, decode: Server
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._session = session

    def legs(self, mode: Any, *, reuse: bool) -> DirectLegs:
        return DirectLegs(
            self._session,
            "m",
            mode,
            Endpoint(self.prefill.url, ("p", 1), tp_size=8),
            Endpoint(self.decode.url, ("d", 2)),
            reuse=reuse,
        )

    def params(self) -> list[tuple[Body, Body]]:
        return [
            (first["kv_transfer_params"], second["kv_transfer_params"])
            for first, second in zip(
                self.prefill.bodies, self.decode.bodies, strict=True
            )
        ]


@pytest_asyncio.fixture
async def engines(session: aiohttp.ClientSession, new_server: NewServer) -> Engines:
    return Engines(session, await new_server(), await new_server())


async def test_a_conversation_names_and_releases_the_turn_before(
    engines: Engines,
) -> None:
    legs = engines.legs("push", reuse=True)

    served = [
        await legs.serve([1, 2, 3, 4], 3, last=last) for last in (False, False, True)
    ]

    ids = [one.transfer_id for one in served]
    assert len(set(ids)) == 3
    assert [one.asked for one in served] == [None, ids[0], ids[1]]
    for number, (first, second) in enumerate(engines.params()):
        assert first["transfer_id"] == second["transfer_id"] == ids[number]
        assert first["do_remote_decode"]
        assert second["do_remote_prefill"]
        assert (second["remote_host"], second["remote_port"]) == ("p", 1)
        assert second["tp_size"] == 8
        assert second["retain"] is (number < 2)
        before = ids[number - 1] if number else None
        assert first.get("retained_transfer_id") == before
        assert second.get("release_transfer_id") == before
        if before is not None:
            assert (first["remote_host"], first["remote_port"]) == ("d", 2)


async def test_without_reuse_nothing_is_named_or_kept(engines: Engines) -> None:
    legs = engines.legs("push", reuse=False)

    served = [await legs.serve([1], 3, last=last) for last in (False, True)]

    assert [one.asked for one in served] == [None, None]
    for first, second in engines.params():
        assert "retained_transfer_id" not in first
        assert "release_transfer_id" not in second
        assert second["retain"] is False


async def test_pull_relays_what_prefill_answered(engines: Engines) -> None:
    served = await engines.legs("pull", reuse=True).serve([1, 2], 3, last=False)

    ((_, second),) = engines.params()
    assert second["remote_request_id"] == "r"
    assert second["transfer_id"] == served.transfer_id
    assert second["retain"] is True


async def test_times_and_counts_are_those_that_were_told(engines: Engines) -> None:
    served = await engines.legs("push", reuse=True).serve([1, 2], 3, last=False)

    assert list(served.answer.tokens) == ANSWER
    assert 0 < served.answer.ttft <= served.answer.total
    assert served.prefill is not None
    assert (served.prefill.prompt_tokens, served.prefill.cached) == (4, 3)
    assert served.prefill.compute == 0.012
    (first,) = engines.prefill.bodies
    (second,) = engines.decode.bodies
    assert (first["max_tokens"], second["max_tokens"]) == (1, 3)


async def test_a_failed_prefill_calls_decode_off(engines: Engines) -> None:
    engines.prefill.status, engines.decode.hangs = 503, True

    with pytest.raises(TurnError, match="answered 503"):
        await engines.legs("push", reuse=True).serve([1], 3, last=False)
    await asyncio.wait_for(engines.decode.hung_up.wait(), TIMEOUT_S)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([{"error": {"message": "no KV"}}], "no KV"),
        ([{"choices": [{"token_ids": [7, 8]}]}], "streamed 2 token ids, expected 3"),
        ([{"choices": [{"text": "abc"}]}], "streamed 0 token ids, expected 3"),
    ],
)
async def test_half_an_answer_is_none(
    engines: Engines, events: list[Body], named: str
) -> None:
    engines.decode.events = events

    with pytest.raises(TurnError, match=named):
        await engines.legs("push", reuse=True).serve([1], 3, last=False)


async def test_a_router_is_told_the_conversation_and_its_end(
    session: aiohttp.ClientSession, new_server: NewServer
) -> None:
    router = await new_server()
    legs = RoutedLegs(session, "m", router.url, "c1")

    for last in (False, True):
        served = await legs.serve([1], 3, last=last)
        assert served.prefill is None
        assert list(served.answer.tokens) == ANSWER

    assert [body["conversation_id"] for body in router.bodies] == ["c1", "c1"]
    assert router.deleted == ["c1"]
    await RoutedLegs(session, "m", router.url, None).serve([1], 3, last=True)
    assert "conversation_id" not in router.bodies[-1]
    assert router.deleted == ["c1"]


async def test_a_reset_is_tried_until_blocks_are_free(
    session: aiohttp.ClientSession, new_server: NewServer
) -> None:
    engine = await new_server()
    engine.resets = [False, False, True]

    await reset(session, engine.url, "m")

    assert engine.resets == [True]
    assert len(engine.bodies) == 2


async def test_an_engine_that_offers_no_reset_is_named(
    session: aiohttp.ClientSession, new_server: NewServer
) -> None:
    engine = await new_server()
    engine.resets = []

    with pytest.raises(TurnError, match="VLLM_SERVER_DEV_MODE=1"):
        await reset(session, engine.url, "m")
