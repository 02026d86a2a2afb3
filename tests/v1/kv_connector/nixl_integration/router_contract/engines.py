# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines as far as a router sees them: real HTTP, no model.

They read ``kv_transfer_params`` with the connector's own parser, hand prompts off to
each other under the names that the connectors would use, and answer with words that
depend on the prompt, so that an answer to somebody else's prompt is noticed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    external_id,
    parse_params,
    prefill_result,
    retention_result,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)

HOST = "127.0.0.1"
MODEL = "contract-model"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EVENT_STREAM = "text/event-stream"

PROBE = "x_contract_probe"
"""A field of P's answer that no router knows."""

KV_TIMEOUT_S = 10.0
"""How long D waits for P."""

HOLD_TIMEOUT_S = 30.0
"""How long an engine that is told to wait does so."""

PIECES = 5


def answer_pieces(prompt: object, index: int) -> list[str]:
    """The words of the right answer, one per token."""
    text = json.dumps([prompt, index], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [f"{digest[8 * i : 8 * i + 8]} " for i in range(PIECES)]


def answer_text(prompt: object, index: int = 0) -> str:
    """The right answer of a whole response."""
    return "".join(answer_pieces(prompt, index))


@dataclass
class Leg:
    """One request as an engine saw it, and how it ended there.

    Attributes:
        params: what the connector reads in it.
        problem: why it cannot be read, if so.
        name: the hand-off's name between the engines; empty if there is none.
        answered: the ``kv_transfer_params`` of the answer.
        outcome: ``answered``, ``failed`` (on purpose) or ``gone`` (the router left).
        cause: why it failed, as the side channel tells it.
    """

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    arrived: float = field(default_factory=time.monotonic)
    params: PrefillParams | DecodeParams | None = None
    problem: str = ""
    name: str = ""
    answered: dict[str, Any] | None = None
    outcome: str = ""
    cause: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt(self) -> object:
        """The prompt, or the messages of a chat."""
        return self.body["messages" if self.path == CHAT else "prompt"]

    @property
    def raw_params(self) -> dict[str, Any]:
        """The hand-off's parameters as they were sent."""
        found = self.body.get("kv_transfer_params")
        return found if isinstance(found, dict) else {}

    @property
    def receivers(self) -> int:
        """How many answers the request asks for."""
        n = self.body.get("n")
        return n if isinstance(n, int) else 1


@dataclass
class Behaviour:
    """What an engine is told to do with its requests, instead of serving them.

    Attributes:
        hold: nothing is answered before this is set.
        pause: a stream goes on after its first word when this is set.
        status: answer with this status.
        break_off: close the connection instead of answering.
        break_computed: so many times, close it when the prompt has been computed.
        error_event: begin a stream with 200 and tell the failure in it.
        cut_after: break a stream off after so many words.
        slowness: seconds that a request takes, by a hash of its prompt.
    """

    hold: asyncio.Event | None = None
    pause: asyncio.Event | None = None
    status: int | None = None
    break_off: bool = False
    break_computed: int = 0
    error_event: bool = False
    cut_after: int | None = None
    slowness: float = 0.0


class Handoffs:
    """What P has computed, by the names under which D may ask for it."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[object, int]] = {}
        self._names: dict[str, str] = {}
        self._changed = asyncio.Condition()

    async def offer(self, leg: Leg, request_id: RequestId) -> None:
        """The prompt of a prefill leg is computed."""
        assert isinstance(leg.params, PrefillParams)
        self._left[leg.name] = leg.prompt, leg.params.num_receivers or 1
        self._names[request_id] = leg.name
        self._names[external_id(request_id, True)] = leg.name
        async with self._changed:
            self._changed.notify_all()

    def name(self, asked: str) -> str:
        """The hand-off's name where D knows only P's request id."""
        return asked if asked in self._left else self._names.get(asked, asked)

    async def take(self, asked: str, prompt: object, receivers: int, wait: bool) -> str:
        """Take the KV for so many answers; returns why not, or nothing."""
        if wait:
            async with asyncio.timeout(KV_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: self.name(asked) in self._left)
        name = self.name(asked)
        if name not in self._left:
            return f"no prefill request with transfer_id {asked!r} arrived"
        computed, left = self._left[name]
        if computed != prompt:
            return "the prompts of the two legs differ"
        if left < receivers:
            return "all announced receivers are served"
        self._left[name] = computed, left - receivers
        return ""


class EngineDouble:
    """One HTTP server; subclasses are the two roles."""

    def __init__(
        self, mode: Mode, handoffs: Handoffs, port: int, side_channel_port: int
    ) -> None:
        self.mode = mode
        self.port = port
        self.side_channel = (HOST, side_channel_port)
        self.engine_id = f"engine-{secrets.token_hex(4)}"
        self.legs: list[Leg] = []
        self.behaviour = Behaviour()
        self._handoffs = handoffs
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._reports: SideChannelServer | None = None

    def open(self) -> None:
        """Open the side channel, at which routers ask why a hand-off failed."""
        self._reports = SideChannelServer(self.side_channel, [], self)

    async def start(self) -> None:
        """Listen for HTTP."""
        app = web.Application(client_max_size=64 << 20)
        for path in (CHAT, COMPLETIONS):
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()

    async def stop(self) -> None:
        """Stop listening and end what is open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def close(self) -> None:
        """Close the side channel, if it is open."""
        if self._reports is not None:
            self._reports.close()

    # ---- what the side channel's thread is asked

    def integrity(self) -> object:
        """Nothing is held here."""
        return {}

    def handoffs(self) -> object:
        """No records are kept."""
        return []

    def failure(self, transfer_id: TransferId) -> object:
        """Why a hand-off failed, as D says it."""
        for leg in list(self.legs):
            if leg.name == transfer_id and leg.cause:
                return {"outcome": "failed", "cause": leg.cause}
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Any, ...]:
        """Nothing is kept here."""
        return ()

    def release(self, transfer_id: TransferId) -> object:
        """As asked."""
        return {"retained": True}

    # ---- HTTP

    async def leg(self, index: int = 0, *, within: float = 15.0) -> Leg:
        """The request of this number, once it is there.

        Raises:
            AssertionError: it did not come in time.
        """
        try:
            async with asyncio.timeout(within), self._arrived:
                await self._arrived.wait_for(lambda: len(self.legs) > index)
        except TimeoutError:
            raise AssertionError(
                f"{type(self).__name__} got {len(self.legs)} requests in {within:g} s, "
                f"expected {index + 1}"
            ) from None
        return self.legs[index]

    def forget(self) -> None:
        """Begin anew: no requests seen, nothing told."""
        self.legs.clear()
        self.behaviour = Behaviour()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        leg = Leg(request.path, json.loads(await request.read()), headers)
        try:
            leg.params = parse_params(leg.body.get("kv_transfer_params"))
        except ParamsError as error:
            leg.problem = str(error)
        request_id = self._request_id(leg)
        leg.name = self._name(leg, external_id(request_id, True))
        async with self._arrived:
            self.legs.append(leg)
            self._arrived.notify_all()
        try:
            response = await self._served(request, leg, request_id)
        except (asyncio.CancelledError, ConnectionResetError):
            leg.outcome = leg.outcome or "gone"
            raise
        finally:
            leg.outcome = leg.outcome or "answered"
            leg.ended.set()
        return response

    async def _served(
        self, request: web.Request, leg: Leg, request_id: RequestId
    ) -> web.StreamResponse:
        told = self.behaviour
        if told.hold is not None:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                await told.hold.wait()
        if told.slowness:
            share = int(hashlib.sha256(repr(leg.prompt).encode()).hexdigest()[:4], 16)
            await asyncio.sleep(told.slowness * share / 0xFFFF)
        if told.break_off:
            leg.outcome = "failed"
            hang_up(request)
            await asyncio.sleep(0.05)
        if told.status is not None:
            leg.outcome = "failed"
            return web.json_response(error_body(told.status), status=told.status)
        return await self._answer(request, leg, request_id)

    def _name(self, leg: Leg, outside: TransferId) -> str:
        raise NotImplementedError

    async def _answer(
        self, request: web.Request, leg: Leg, request_id: RequestId
    ) -> web.StreamResponse:
        raise NotImplementedError

    @property
    def _address(self) -> PrefillAddress:
        return PrefillAddress(*self.side_channel, EngineId(self.engine_id))

    @staticmethod
    def _request_id(leg: Leg) -> RequestId:
        """As the front end names requests and the engine makes them unique."""
        outside = leg.headers.get("x-request-id") or secrets.token_hex(16)
        front = f"chatcmpl-{outside}" if leg.path == CHAT else f"cmpl-{outside}-0"
        return RequestId(f"{front}-{secrets.token_hex(4)}")


class PrefillDouble(EngineDouble):
    """Computes prompts."""

    def _name(self, leg: Leg, outside: TransferId) -> str:
        if not isinstance(leg.params, PrefillParams):
            return ""
        return leg.params.transfer_id or outside

    async def _answer(
        self, request: web.Request, leg: Leg, request_id: RequestId
    ) -> web.StreamResponse:
        body = whole_answer(leg)
        if isinstance(leg.params, PrefillParams):
            await self._handoffs.offer(leg, request_id)
            if self.behaviour.break_computed:
                self.behaviour.break_computed -= 1
                leg.outcome = "failed"
                hang_up(request)
                await asyncio.sleep(0.05)
            leg.answered = {
                **prefill_result(
                    mode=self.mode,
                    transfer_id=TransferId(leg.name),
                    request_id=request_id,
                    address=self._address,
                    block_ids=([3, 1, 2],),
                    num_tokens=40,
                    generation=5 if self.mode is Mode.PULL else None,
                ),
                PROBE: {"text": secrets.token_hex(4), "list": [1, None, 2.5, {}]},
            }
            body["kv_transfer_params"] = leg.answered
        return web.json_response(body)


class DecodeDouble(EngineDouble):
    """Takes prompts off P and answers them."""

    def _name(self, leg: Leg, outside: TransferId) -> str:
        params = leg.params
        if not isinstance(params, DecodeParams):
            return ""
        if params.transfer_id is not None:
            return params.transfer_id
        if self.mode is Mode.PULL and params.remote_request_id is not None:
            return self._handoffs.name(params.remote_request_id)
        return outside

    async def _answer(
        self, request: web.Request, leg: Leg, request_id: RequestId
    ) -> web.StreamResponse:
        told = self.behaviour
        stream: web.StreamResponse | None = None
        if leg.body.get("stream"):
            # Engines send their headers at once, before there is any KV.
            stream = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
            await stream.prepare(request)
        failure = "told to fail" if told.error_event else await self._take(leg)
        if failure:
            leg.outcome, leg.cause = "failed", failure
            # As the engine does: the cause is not in it.
            error = error_body(500, "Internal server error")
            if stream is None:
                return web.json_response(error, status=500)
            await stream.write(event(error) + DONE)
            return stream
        if stream is None:
            body = whole_answer(leg)
            if isinstance(leg.params, DecodeParams) and leg.params.retain:
                leg.answered = retention_result(
                    mode=self.mode,
                    transfer_id=TransferId(leg.name),
                    address=self._address,
                    num_groups=1,
                    num_tokens=40 + PIECES,
                    expires_at=time.time() + 480,
                )
                body["kv_transfer_params"] = leg.answered
            return web.json_response(body)
        await self._stream(request, stream, leg)
        return stream

    async def _take(self, leg: Leg) -> str:
        if not isinstance(leg.params, DecodeParams):
            return ""
        try:
            return await self._handoffs.take(
                leg.name, leg.prompt, leg.receivers, wait=self.mode is Mode.PUSH
            )
        except TimeoutError:
            return f"no prefill request with transfer_id {leg.name!r} arrived"

    async def _stream(
        self, request: web.Request, stream: web.StreamResponse, leg: Leg
    ) -> None:
        told = self.behaviour
        for number in range(PIECES):
            if number == told.cut_after:
                leg.outcome = "failed"
                hang_up(request)
                await asyncio.sleep(0.05)
            for index in range(leg.receivers):
                await stream.write(event(stream_event(leg, index, number)))
            if number == 0 and told.pause is not None:
                async with asyncio.timeout(HOLD_TIMEOUT_S):
                    await told.pause.wait()
        await stream.write(DONE)
        await stream.write_eof()


DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_body(status: int, message: str = "told to fail") -> dict[str, Any]:
    """An engine's error answer."""
    return {"error": {"message": message, "type": "engine", "code": status}}


def hang_up(request: web.Request) -> None:
    """Close the connection under a request."""
    if request.transport is not None:
        request.transport.close()


def whole_answer(leg: Leg) -> dict[str, Any]:
    """The whole answer to a request."""
    choices: list[dict[str, Any]] = []
    for index in range(leg.receivers):
        text = answer_text(leg.prompt, index)
        said: dict[str, Any] = {"text": text}
        if leg.path == CHAT:
            said = {"message": {"role": "assistant", "content": text}}
        choices.append({"index": index, "finish_reason": "length", **said})
    return {
        "id": "an-answer",
        "object": "chat.completion" if leg.path == CHAT else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": 40, "completion_tokens": PIECES, "total_tokens": 45},
    }


def stream_event(leg: Leg, index: int, number: int) -> Mapping[str, Any]:
    """The event of one word."""
    word = answer_pieces(leg.prompt, index)[number]
    said: dict[str, Any] = {"text": word}
    if leg.path == CHAT:
        said = {"delta": {"content": word}}
    finish = "length" if number == PIECES - 1 else None
    return {
        "id": "an-answer",
        "object": "chat.completion.chunk" if leg.path == CHAT else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": index, "finish_reason": finish, **said}],
    }
