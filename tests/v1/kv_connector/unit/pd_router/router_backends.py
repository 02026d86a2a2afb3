# SPDX-License-Identifier: Apache-2.0
"""Engines that (mis)behave as told, over real sockets, and a router in front."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from pd_router.app import build_app
from pd_router.config import (
    Address,
    Mode,
    Role,
    RouterConfig,
    SideChannel,
    Timeouts,
    WorkerSpec,
)
from pd_router.router import Router
from pd_router.server import DrainingServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Short enough for tests that wait for them, long enough for a busy machine.
FAST = Timeouts(
    connect=2.0, prefill=20.0, first_event=20.0, idle=20.0, drain=5.0, health=2.0
)


@dataclass
class Seen:
    """One request as an engine saw it, and how it ended there."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    request: web.Request
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any]:
        """The hand-off parameters of the request."""
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict)
        return params


Script = Callable[[Seen], Awaitable[web.StreamResponse]]


class Engine:
    """An HTTP server that records requests and answers by its script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.health = 200
        self.model_list: Any = {"object": "list", "data": [{"id": "tiny"}]}
        self.address = Address("127.0.0.1", free_port())
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/{tail:.*}", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address.host, self.address.port).start()

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def request(self, index: int = 0) -> Seen:
        """The request with this number, once it is there."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len(self.seen) > index)
        return self.seen[index]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.path,
            json.loads(await request.read()),
            {k.lower(): v for k, v in request.headers.items()},
            request,
        )
        async with self._arrived:
            self.seen.append(seen)
            self._arrived.notify_all()
        try:
            response = await self.script(seen)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.disconnected.set()
            raise
        seen.finished.set()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.model_list)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)


def answers(
    body: Any = None,
    *,
    status: int = 200,
    after: float = 0.0,
    headers: dict[str, str] | None = None,
) -> Script:
    """A whole JSON answer."""

    async def script(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(after)
        value = body if body is not None else completion("hi")
        return web.json_response(value, status=status, headers=headers)

    return script


def streams(
    *pieces: bytes,
    gap: float = 0.0,
    end: str = "clean",
    content_type: str = "text/event-stream; charset=utf-8",
) -> Script:
    """A stream of exactly these writes.

    ``end`` is ``clean``, ``abort`` (the connection breaks) or ``hang``.
    """

    async def script(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(seen.request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(gap)
        if end == "abort":
            transport = seen.request.transport
            assert transport is not None
            await asyncio.sleep(0.05)
            transport.close()
            await asyncio.sleep(0.05)
        elif end == "hang":
            await asyncio.sleep(60)
        else:
            await response.write_eof()
        return response

    return script


def hangs() -> Script:
    """No answer at all."""

    async def script(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits that long")

    return script


def in_turn(*scripts: Script) -> Script:
    """The first script for the first request, and so on; the last one stays."""
    left = list(scripts)

    async def script(seen: Seen) -> web.StreamResponse:
        current = left.pop(0) if len(left) > 1 else left[0]
        return await current(seen)

    return script


def prefill_answer(**params: Any) -> dict[str, Any]:
    """What a prefill engine returns for a pull hand-off."""
    return {
        **completion("x"),
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "engine-p",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            **params,
        },
    }


def completion(*texts: str, usage: tuple[int, int] = (3, 1)) -> dict[str, Any]:
    """A whole answer to a completion request."""
    prompt, generated = usage
    return {
        "id": "cmpl-engine",
        "object": "text_completion",
        "created": 17,
        "model": "tiny",
        "choices": [
            {"index": i, "text": text, "finish_reason": "stop"}
            for i, text in enumerate(texts)
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        },
    }


def event(value: Any) -> bytes:
    """One event as engines write it."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str, index: int = 0, finish: str | None = None) -> bytes:
    """One event of a completion stream."""
    choice = {"index": index, "text": text, "finish_reason": finish}
    return event(
        {
            "id": "cmpl-engine",
            "object": "text_completion",
            "created": 17,
            "model": "tiny",
            "choices": [choice],
        }
    )


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    return event(
        {
            "id": "chatcmpl-engine",
            "object": "chat.completion.chunk",
            "created": 17,
            "model": "tiny",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
    )


DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "Internal server error", "type": "x", "code": 500}})


class Cluster:
    """Engines, a router in front of them and a client."""

    def __init__(self) -> None:
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.router: Router
        self._server: DrainingServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(
        self,
        mode: Mode | str,
        prefill: Script | Sequence[Script | None],
        decode: Script | Sequence[Script | None],
        *,
        timeouts: Timeouts = FAST,
        ranks: Mapping[Role, int] | None = None,
        **settings: Any,
    ) -> None:
        """Start engines and router; a script of ``None`` is a dead engine.

        Dead engines pass for healthy until a request finds out. ``ranks`` are the
        data-parallel ranks that engines of a role are.
        """
        mode = Mode(mode)
        specs = []
        dead = []
        for role, scripts, engines in (
            (Role.PREFILL, prefill, self.prefill),
            (Role.DECODE, decode, self.decode),
        ):
            for script in scripts if isinstance(scripts, Sequence) else [scripts]:
                engine = Engine(script or hangs())
                engines.append(engine)
                if script is not None:
                    await engine.start()
                else:
                    dead.append(engine.address)
                channel = None
                if role is Role.PREFILL and mode is Mode.PUSH:
                    port = 5600 + len(engines) - 1
                    channel = SideChannel("127.0.0.1", port, "engine-p", 2, 1)
                address = replace(engine.address, dp_rank=(ranks or {}).get(role))
                specs.append(WorkerSpec(role, address, channel))
        config = RouterConfig(
            mode=mode,
            workers=tuple(specs),
            port=free_port(),
            timeouts=timeouts,
            health_interval=settings.pop("health_interval", 30.0),
        )
        self.router = Router(replace(config, **settings))
        await self._serve()
        await self.router.health.check_all()
        for worker in self.router.workers:
            if worker.address in dead:
                worker.mark_up()

    async def _serve(self) -> None:
        config = self.router.config
        self._server = _InLoopServer(
            uvicorn.Config(
                build_app(self.router),
                host=config.host,
                port=config.port,
                log_level="error",
                timeout_graceful_shutdown=1,
            ),
            self.router,
        )
        self._task = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(10):
            while not self._server.started:
                await asyncio.sleep(0.01)
        self._session = aiohttp.ClientSession(
            f"http://{config.host}:{config.port}",
            timeout=aiohttp.ClientTimeout(total=30),
            auto_decompress=False,
        )

    @property
    def client(self) -> aiohttp.ClientSession:
        """A client of the router."""
        assert self._session is not None
        return self._session

    async def post(
        self,
        body: Any,
        path: str = COMPLETIONS,
        headers: dict[str, str] | None = None,
    ) -> "Got":
        """Send a request and read the whole answer."""
        async with self.client.post(path, json=body, headers=headers) as response:
            data = await response.read()
            return Got(response.status, response.headers, data)

    async def get(self, path: str) -> "Got":
        async with self.client.get(path) as response:
            data = await response.read()
            return Got(response.status, response.headers, data)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of these series once no request is running."""
        async with asyncio.timeout(10):
            await self.router.in_flight.wait_idle()
        text = (await self.get("/metrics")).body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(w in series for w in wanted):
                total += float(value)
        return total

    async def quiet(self) -> None:
        """Wait until no request and no leg is left; fails after a while."""
        async with asyncio.timeout(10):
            await self.router.in_flight.wait_idle()
        assert [w.outstanding for w in self.router.workers] == [0] * len(
            list(self.router.workers)
        )

    async def stop(self) -> None:
        if self._session:
            await self._session.close()
        if self._server and self._task:
            # Uvicorn's own way out polls; hundreds of tests need not wait for it.
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            for listener in self._server.servers:
                listener.close()
            for connection in list(self._server.server_state.connections):
                connection.shutdown()
            await self.router.in_flight.wait_idle()
            await self._server.lifespan.shutdown()
        for engine in (*self.prefill, *self.decode):
            await engine.stop()


@dataclass(frozen=True)
class Got:
    """A whole answer as the client saw it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert isinstance(error, dict)
        return error


class _InLoopServer(DrainingServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The test runner's own signal handlers stay in place.
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port
