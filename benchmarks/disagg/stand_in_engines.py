# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for engines: HTTP servers that take the time that engines would take.

They compute nothing, so what is measured with them is the router's choice alone, on a
machine of any size. A prefill stand-in computes one prompt after the other. A decode
stand-in has so many slots; a request waits for one, then for its prompt's KV, and then
gets a token at a time. KV moves in no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_START_SECONDS = 10.0


@dataclass(frozen=True)
class Pace:
    """How fast the stand-ins are; times are in seconds for each token."""

    prefill: float = 0.0002
    decode: float = 0.02
    slots: int = 2


class StandIns:
    """A prefill and several decode stand-ins, in a thread of their own."""

    def __init__(self, prefill: int, decode: Sequence[int], pace: Pace) -> None:
        self._ports = prefill, tuple(decode)
        self._pace = pace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runners: list[web.AppRunner] = []
        self._computed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

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
            self._computed[params["transfer_id"]].set()
            told = {"do_remote_prefill": True, "transfer_id": params["transfer_id"]}
            return web.json_response({"choices": [], "kv_transfer_params": told})

        await self._serve(prefill, compute)
        for port in decode:
            await self._serve(port, self._decoder())

    def _decoder(self) -> _Handler:
        slots = asyncio.Semaphore(self._pace.slots)

        async def generate(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async with slots:
                params = body.get("kv_transfer_params")
                if params is None:
                    await asyncio.sleep(self._pace.prefill * len(body["prompt"]))
                else:
                    await self._computed[params["transfer_id"]].wait()
                for _ in range(body["max_tokens"]):
                    await asyncio.sleep(self._pace.decode)
                    await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await response.write(b"data: [DONE]\n\n")
            return response

        return generate

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
        for runner in self._runners:
            with contextlib.suppress(ConnectionError):
                await runner.cleanup()
