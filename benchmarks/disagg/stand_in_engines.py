# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for engines: HTTP servers that take the time that engines would take.

They compute nothing, so what is measured with them is the router's choice alone, on a
machine of any size. A prefill stand-in computes one prompt after the other. A decode
stand-in has so many slots. A request asks for its prompt's KV once it finds a slot
free, waits for it, then for a slot to run in, and gets a token at a time. KV moves in
no time.

A hand-off is over when somebody has got the KV and nobody else has asked for it; who
asks then is refused, as the engines do it. The side channel tells which ones are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_START_SECONDS = 10.0
_EVENT_STREAM = {"Content-Type": "text/event-stream"}
_REFUSED = b'data: {"error": {"message": "refused", "code": 500}}\n\n'


@dataclass(frozen=True)
class Pace:
    """How fast the stand-ins are; times are in seconds for each token."""

    prefill: float = 0.0002
    decode: float = 0.02
    slots: int = 2


@dataclass
class _Handoff:
    """What the prefill stand-in knows of one."""

    computed: asyncio.Event = field(default_factory=asyncio.Event)
    asking: int = 0
    given: bool = False

    @property
    def over(self) -> bool:
        return self.given and not self.asking


class _Slots:
    """Those of one decode stand-in, first come, first served."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self._changed = asyncio.Condition()

    async def one_free(self) -> None:
        """Wait until one is, without taking it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._free.locked())

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Run in one."""
        try:
            async with self._free:
                yield
        finally:
            async with self._changed:
                self._changed.notify_all()


class StandIns:
    """A prefill and several decode stand-ins, in a thread of their own.

    Args:
        prefill: the prefill stand-in's port.
        decode: the decode stand-ins' ports.
        side_channels: ports at which routers may ask of hand-offs.
    """

    def __init__(
        self,
        prefill: int,
        decode: Sequence[int],
        side_channels: Sequence[int],
        pace: Pace,
    ) -> None:
        self._ports = prefill, tuple(decode)
        self._side_channels = tuple(side_channels)
        self._pace = pace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runners: list[web.AppRunner] = []
        self._handoffs: dict[str, _Handoff] = defaultdict(_Handoff)
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: a port is taken.
        """
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(
            _START_SECONDS
        )

    def stop(self) -> None:
        """Close all connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(
            _START_SECONDS
        )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)

    async def _listen(self) -> None:
        prefill, decode = self._ports
        turn = asyncio.Lock()

        async def compute(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            async with turn:
                await asyncio.sleep(self._pace.prefill * len(body["prompt"]))
            params = body["kv_transfer_params"]
            self._handoffs[params["transfer_id"]].computed.set()
            told = {"do_remote_prefill": True, "transfer_id": params["transfer_id"]}
            return web.json_response({"choices": [], "kv_transfer_params": told})

        await self._serve(prefill, compute)
        for port in decode:
            await self._serve(port, self._decoder())
        sock = zmq.asyncio.Context.instance().socket(zmq.REP)
        for port in self._side_channels:
            sock.bind(f"tcp://127.0.0.1:{port}")
        self._telling = asyncio.create_task(self._tell(sock))

    def _decoder(self) -> _Handler:
        slots = _Slots(self._pace.slots)

        async def generate(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            response = web.StreamResponse(headers=_EVENT_STREAM)
            # Who asked may have left before the answer begins.
            with contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                await self._generate(slots, body, response)
            return response

        return generate

    async def _generate(
        self, slots: _Slots, body: dict[str, Any], response: web.StreamResponse
    ) -> None:
        await slots.one_free()
        params = body.get("kv_transfer_params")
        if params is None:
            await asyncio.sleep(self._pace.prefill * len(body["prompt"]))
        elif not await self._receive(self._handoffs[params["transfer_id"]]):
            await response.write(_REFUSED)
            return
        async with slots.taken():
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(self._pace.decode)
                await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")

    async def _receive(self, handoff: _Handoff) -> bool:
        """Wait for KV; false where it is gone."""
        if handoff.over:
            return False
        handoff.asking += 1
        try:
            await handoff.computed.wait()
            handoff.given = True
        finally:
            handoff.asking -= 1
        return True

    async def _tell(self, sock: zmq.asyncio.Socket) -> None:
        """Answer the only question that a router asks."""
        with sock:
            while True:
                _, transfer_id = msgspec.msgpack.decode(await sock.recv())
                record = {"outcome": "served"}
                over = self._handoffs[transfer_id].over
                told = msgspec.json.encode(record if over else None)
                await sock.send(msgspec.msgpack.encode(["report", told]))

    async def _serve(self, port: int, handler: _Handler) -> None:
        async def health(_: web.Request) -> web.StreamResponse:
            return web.Response()

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", handler)
        app.router.add_get("/health", health)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", port).start()

    async def _close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        for runner in self._runners:
            with contextlib.suppress(ConnectionError):
                await runner.cleanup()
