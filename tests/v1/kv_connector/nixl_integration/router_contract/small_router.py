# SPDX-License-Identifier: Apache-2.0
"""A router as small as the contract allows, to plant defects in."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from router_contract.engines import CHAT, COMPLETIONS, EVENT_STREAM
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode

PARAMS = "kv_transfer_params"
Body = dict[str, Any]


class LegError(Exception):
    """A leg failed; ``refusal`` holds the engine's answer if that was a refusal."""

    def __init__(self, refusal: tuple[int, bytes] | None = None) -> None:
        super().__init__("a leg failed")
        self.refusal = refusal


class SmallRouter:
    """One prefill and one decode engine; keeps the contract.

    Each method is one thing that a router may get wrong; see ``defects.py``.

    Args:
        prefill: ``host:port`` of the engine; ``decode`` likewise.
        channels: the side channels of both.
    """

    def __init__(
        self,
        mode: Mode,
        prefill: str,
        decode: str,
        channels: tuple[tuple[str, int], tuple[str, int]],
    ) -> None:
        self.mode = mode
        self.prefill, self.decode = prefill, decode
        self.prefill_channel, self.decode_channel = channels
        self.turns: dict[str, str] = {}
        self.session: aiohttp.ClientSession

    # ---- names and bodies

    def new_name(self, headers: Mapping[str, str]) -> str:
        """A hand-off's name."""
        return uuid.uuid4().hex

    def prefill_name(self, name: str) -> str:
        """The name on the prefill leg."""
        return name

    def cleaned(self, body: Body) -> Body:
        """The client's request without what is not the client's to say."""
        return {k: v for k, v in body.items() if k not in (PARAMS, "conversation_id")}

    def prefill_body(self, body: Body) -> Body:
        """What P is asked for."""
        dropped = ("stream_options", "min_tokens", "stop", "logprobs", "top_logprobs")
        leg = {key: value for key, value in body.items() if key not in dropped}
        leg.update(max_tokens=1, stream=False, n=1)
        if "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = 1
        return leg

    def prefill_params(self, name: str, body: Body, conversation: str) -> Body:
        """The parameters of the prefill leg."""
        params: Body = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": self.prefill_name(name),
            "num_receivers": body.get("n", 1),
        }
        earlier = self.turns.get(conversation)
        if earlier is not None:
            params["retained_transfer_id"] = earlier
            params["remote_host"], params["remote_port"] = self.decode_channel
        return params

    def push_params(self, name: str) -> Body:
        """The parameters of a decode leg that goes out with the prefill leg."""
        host, port = self.prefill_channel
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name,
            "remote_host": host,
            "remote_port": port,
        }

    def pull_params(self, name: str, answered: Body) -> Body:
        """The parameters of a decode leg that follows P's answer."""
        return {**answered, "transfer_id": name}

    def decode_body(self, body: Body) -> Body:
        """What D is asked for."""
        return body

    def kept(self, body: Body) -> Body:
        """A whole answer without what is not the client's to know."""
        return {key: value for key, value in body.items() if key != PARAMS}

    def parts(self, body: Body) -> list[Body]:
        """One request for each prompt."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list):
            return [body]
        return [{**body, "prompt": one} for one in prompt]

    def conversation(self, body: Body, headers: Mapping[str, str]) -> str:
        """Which conversation a request belongs to; empty if to none."""
        name = body.get("conversation_id")
        return f"{headers.get('Authorization')} {name}" if name else ""

    # ---- legs

    async def post_prefill(self, path: str, body: Body, headers: Body) -> Body:
        """Run the prefill leg; returns P's answer.

        Raises:
            LegError: there is none.
        """
        async with self._post(self.prefill, path, body, headers) as response:
            answer = await response.read()
        value: Body = json.loads(answer)
        return value

    @asynccontextmanager
    async def _post(
        self, engine: str, path: str, body: Body, headers: Body
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a leg.

        Raises:
            LegError: the engine cannot be asked, or answers with an error.
        """
        url = f"http://{engine}{path}"
        try:
            async with self.session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    refused = 400 <= response.status < 500
                    data = await response.read()
                    raise LegError((response.status, data) if refused else None)
                yield response
        except aiohttp.ClientError as error:
            raise LegError from error

    async def first_event(self, response: aiohttp.ClientResponse) -> bytes:
        """The beginning of a stream, up to where it shows whether it is one.

        Raises:
            LegError: it begins with an error, or not at all.
        """
        data = b""
        while b"\n\n" not in data:
            more = await response.content.readany()
            if not more:
                raise LegError
            data += more
        if b'"error"' in data:
            raise LegError
        return data

    async def together(
        self, prefill: Awaitable[Body], decode: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        """Both legs at once; the first failure ends the other."""
        legs = [asyncio.ensure_future(prefill), asyncio.ensure_future(decode)]
        try:
            await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        answer = legs[1].result()
        assert isinstance(answer, web.StreamResponse)
        return answer

    # ---- requests

    def failure(self) -> web.Response:
        """What the client is told of a failed hand-off."""
        error = {"message": "the hand-off failed", "code": 503, "retryable": True}
        headers = {"Retry-After": "1"}
        return web.json_response({"error": error}, status=503, headers=headers)

    def refusal(self, status: int, body: bytes) -> web.Response:
        """What the client is told of a request that an engine refuses."""
        return web.Response(status=status, body=body, content_type="application/json")

    def broken(self, request: web.Request) -> None:
        """Tell the client that a stream broke off."""
        if request.transport is not None:
            request.transport.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request."""
        body: Body = json.loads(await request.read())
        conversation = self.conversation(body, request.headers)
        parts = self.parts(self.cleaned(body))
        try:
            if len(parts) == 1:
                return await self.serve(request, parts[0], conversation)
            answers = [await self.serve(request, part, "") for part in parts]
        except LegError as error:
            if error.refusal is not None:
                return self.refusal(*error.refusal)
            return self.failure()
        return self.merged(answers)

    def merged(self, answers: list[web.StreamResponse]) -> web.Response:
        """The answers to a list of prompts as one."""
        values = []
        for answer in answers:
            assert isinstance(answer, web.Response)
            assert isinstance(answer.body, bytes)
            values.append(json.loads(answer.body))
        merged = copy.deepcopy(values[0])
        merged["choices"] = [
            {**value["choices"][0], "index": index}
            for index, value in enumerate(values)
        ]
        return web.json_response(merged)

    async def serve(
        self, request: web.Request, body: Body, conversation: str
    ) -> web.StreamResponse:
        """Serve one prompt."""
        name, path = self.new_name(request.headers), request.path
        headers = {"X-Request-Id": name}
        params = self.prefill_params(name, body, conversation)
        first = {**self.prefill_body(body), PARAMS: params}
        prefill = self.post_prefill(path, first, headers)
        if self.mode is Mode.PUSH:
            told = self.push_params(name)
            decode = self.relay(request, path, body, told, headers)
            answer = await self.together(prefill, decode)
        else:
            answered = (await prefill)[PARAMS]
            told = self.pull_params(name, answered)
            answer = await self.relay(request, path, body, told, headers)
        if conversation:
            self.turn_ended(conversation, name)
        return answer

    def turn_ended(self, conversation: str, name: str) -> None:
        """A turn has been answered."""
        self.turns[conversation] = name

    async def relay(
        self, request: web.Request, path: str, body: Body, params: Body, headers: Body
    ) -> web.StreamResponse:
        """Run the decode leg; a stream goes to the client as it comes."""
        leg = {**self.decode_body(body), PARAMS: params}
        async with self._post(self.decode, path, leg, headers) as response:
            if not body.get("stream"):
                value = json.loads(await response.read())
                return web.json_response(self.kept(value))
            data = await self.first_event(response)
            stream = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
            await stream.prepare(request)
            try:
                while data:
                    await self.write(stream, data)
                    data = await response.content.readany()
            except aiohttp.ClientError:
                self.broken(request)
            await self.end(stream)
            return stream

    async def write(self, stream: web.StreamResponse, data: bytes) -> None:
        """Pass a part of a stream on."""
        await stream.write(data)

    async def end(self, stream: web.StreamResponse) -> None:
        """End a stream."""
        await stream.write_eof()

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        """Serve at a port of this host."""
        app = web.Application(client_max_size=64 << 20)
        for path in (CHAT, COMPLETIONS):
            app.router.add_post(path, self.handle)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            try:
                yield
            finally:
                await runner.cleanup()


def digest(value: object) -> str:
    """A short name of any JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
