# SPDX-License-Identifier: Apache-2.0
"""Two servers that behave like a pair of engines, faults included, and their router.

HTTP, side channels and router are real; what they compute is a function of the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from aiohttp import web

from pd_processes import free_ports
from pd_router.app import build_app
from pd_router.config import (
    Address,
    Mode,
    Role,
    RouterConfig,
    SideChannel,
    WorkerSpec,
)
from pd_router.router import Router
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept

HOST = "127.0.0.1"
BLOCK_SIZE = 32
BLOCK_BYTES, REGIONS = 1000, 4
MODEL = "tiny"
CACHE_LABELS = f'block_size="{BLOCK_SIZE}",enable_prefix_caching="True"'
TOTAL_BLOCKS = 100
CONNECTORS = {"push": "NixlPushConnector", "pull": "NixlConnector"}
TOKEN_S = 50e-6
"""What a prompt token takes to compute."""
STEP_S = 0.001
LEASE_S = 0.5
WAIT_S = 2.0


@dataclass
class Faults:
    """What goes wrong; all may be changed while the pair runs."""

    recompute: bool = False
    """D computes prompts itself, whatever it is told."""
    cached: bool = False
    """Salts are ignored: what was computed once is never computed again."""
    answer: str = ""
    """Of prompts that were handed off: ``wrong``, ``tie`` or ``off``."""
    only_of: int = 0
    """Prompts of at least so many tokens have that wrong answer."""
    leak: bool = False
    """Blocks of requests whose clients hang up stay held."""
    die: bool = False
    """An engine ends when a client hangs up."""
    fails: bool = False
    """Hand-offs fail, which D says with a status of 500."""
    tells_logprobs: bool = True
    tells_sources: bool = True
    refuses: bool = False
    """Requests are refused with a status of 400."""
    unlike_alone: bool = False
    """P computes other answers than D."""


@dataclass
class World:
    """What both engines know: the hand-offs under way."""

    mode: str
    token: Token | None = None
    faults: Faults = field(default_factory=Faults)
    computed: dict[str, asyncio.Event] = field(default_factory=dict)

    def done(self, transfer_id: str) -> asyncio.Event:
        """Set once the prompt of a hand-off is computed."""
        return self.computed.setdefault(transfer_id, asyncio.Event())


class FakeEngine:
    """One engine's HTTP server and side channel."""

    def __init__(self, role: str, world: World) -> None:
        self.role = role
        self.world = world
        port, self.channel = free_ports(2)
        self.address = Address(HOST, port)
        self.url = self.address.url
        self.held = 0
        self.kept = 0
        self.running = 0
        self.bytes = self.transfers = self.descriptors = 0
        self.sources = {"local_compute": 0, "external_kv_transfer": 0}
        self.records: list[dict[str, Any]] = []
        self.seen: set[tuple[int, ...]] = set()
        self._runner: web.AppRunner | None = None
        self._server: SideChannelServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def side_channel(self) -> str:
        return f"{HOST}:{self.channel}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.address.port).start()
        self._server = SideChannelServer(
            (HOST, self.channel), [], self, self.world.token
        )

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if runner is not None:
            await runner.cleanup()

    # ---- what the side channel is answered from

    def integrity(self) -> object:
        rank = {
            "block_size": BLOCK_SIZE,
            "block_bytes": BLOCK_BYTES,
            "regions": REGIONS,
            "dtype": "torch.float32",
            "memory": "DRAM",
            "transport": {"backends": "UCX", "efa_devices": "0"},
        }
        return {
            "mode": self.world.mode,
            "free_blocks": TOTAL_BLOCKS - self.held - self.kept,
            "total_blocks": TOTAL_BLOCKS,
            "pins": {"exposed_for_send": self.held, "retained": self.kept},
            "tables": {"prefill_waiting": 0, "retained": 1, "rank0_kept": 1}
            if self.kept
            else {"prefill_waiting": 0},
            "counters": {},
            "ranks": [rank],
        }

    def handoffs(self) -> object:
        return list(self.records)

    def failure(self, transfer_id: TransferId) -> object:
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        return ()

    def release(self, transfer_id: TransferId) -> object:
        return {"retained": False}

    # ---- HTTP

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 4096}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        digests = (hashlib.sha256(word.encode()).digest() for word in words)
        ids = [100 + int.from_bytes(digest[:2]) % 900 for digest in digests]
        return web.json_response({"tokens": ids})

    async def _metrics(self, request: web.Request) -> web.Response:
        connector = CONNECTORS[self.world.mode]
        lines = [
            f"vllm:cache_config_info{{{CACHE_LABELS}}} 1.0",
            f'vllm:nixl_info{{connector="{connector}",backends="UCX"}} 1.0',
            f"vllm:num_requests_running {float(self.running)}",
            f"vllm:kv_cache_usage_perc {(self.held + self.kept) / TOTAL_BLOCKS}",
            f"vllm:nixl_retained_blocks {float(self.kept)}",
            f"vllm:nixl_bytes_transferred_sum {float(self.bytes)}",
            f"vllm:nixl_bytes_transferred_count {float(self.transfers)}",
            f"vllm:nixl_num_descriptors_sum {float(self.descriptors)}",
        ]
        if self.role == "decode":
            ended = sum(r["outcome"] == "received" for r in self.records)
            lines.append(f"vllm:nixl_handoff_total_seconds_count {float(ended)}")
        if self.world.faults.tells_sources:
            lines += [
                f'vllm:prompt_tokens_by_source_total{{source="{name}"}} {float(n)}'
                for name, n in self.sources.items()
            ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.world.faults.refuses and body["max_tokens"] > 1:
            return web.json_response({"error": "no logprobs here"}, status=400)
        self.running += 1
        self.held += 1
        released = False
        try:
            response = await self._serve(request, body)
            released = True
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            released = not self.world.faults.leak
            if self.world.faults.die:
                self._tasks.add(asyncio.create_task(self.stop()))
            raise
        finally:
            self.running -= 1
            if released:
                self.held -= 1

    async def _serve(
        self, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        prompt = tuple(body["prompt"])
        params = body.get("kv_transfer_params") or {}
        faults = self.world.faults
        handed = bool(params.get("do_remote_prefill")) and not faults.recompute
        answered: dict[str, Any] | None = None
        if handed:
            if faults.fails:
                self._record(request, params, "failed", "the model differs")
                return web.json_response({"error": "no KV"}, status=500)
            if not await self._receive(request, prompt, params):
                return web.json_response({"error": "no KV"}, status=500)
        else:
            await self._compute(prompt)
        if params.get("do_remote_decode"):
            self.world.done(params["transfer_id"]).set()
            answered = {"do_remote_prefill": True, "remote_host": HOST}
            if self.world.mode == "pull":
                self._tasks.add(asyncio.create_task(self._lend(params["transfer_id"])))
        reply = _reply(prompt, body["max_tokens"], self._spoilt(prompt, handed), faults)
        reply["kv_transfer_params"] = answered
        if not body.get("stream"):
            await asyncio.sleep(body["max_tokens"] * STEP_S)
            return web.json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in _events(reply):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(STEP_S)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _compute(self, prompt: tuple[int, ...]) -> None:
        if not (self.world.faults.cached and prompt in self.seen):
            self.sources["local_compute"] += len(prompt)
        self.seen.add(prompt)
        await asyncio.sleep(len(prompt) * TOKEN_S)

    async def _receive(
        self, request: web.Request, prompt: tuple[int, ...], params: dict[str, Any]
    ) -> bool:
        transfer_id = params["transfer_id"]
        try:
            async with asyncio.timeout(WAIT_S):
                await self.world.done(transfer_id).wait()
        except TimeoutError:
            return False
        self.sources["external_kv_transfer"] += len(prompt)
        blocks = -(-len(prompt) // BLOCK_SIZE)
        self.bytes += blocks * BLOCK_BYTES
        self.transfers += 1
        self.descriptors += blocks
        self._record(request, params, "received", "", len(prompt), blocks)
        return True

    def _record(
        self,
        request: web.Request,
        params: dict[str, Any],
        outcome: str,
        cause: str,
        tokens: int = 0,
        blocks: int = 0,
    ) -> None:
        name = request.headers["X-Request-Id"]
        self.records.append(
            {
                "transfer_id": params["transfer_id"],
                "request_id": f"cmpl-{name}-0-abc",
                "role": "receiver",
                "outcome": outcome,
                "cause": cause,
                "tokens": tokens,
                "bytes": blocks * BLOCK_BYTES,
                "descriptors": blocks,
                "seconds": 0.01,
            }
        )

    async def _lend(self, transfer_id: str) -> None:
        """Pull: the blocks are held until they are read, or the lease has ended."""
        self.held += 1
        await asyncio.sleep(LEASE_S)
        self.held -= 1

    def _spoilt(self, prompt: tuple[int, ...], handed: bool) -> str:
        faults = self.world.faults
        if handed and len(prompt) >= faults.only_of:
            return faults.answer
        return "wrong" if faults.unlike_alone and self.role == "prefill" else ""


def _reply(
    prompt: tuple[int, ...], count: int, spoilt: str, faults: Faults
) -> dict[str, Any]:
    rng = random.Random(str(prompt))
    tokens = [rng.randrange(100, 1000) for _ in range(count)]
    second = [token + 1 for token in tokens]
    first_logprob, second_logprob = -0.5, -2.0
    if spoilt == "tie":
        # The two lead by less than float32 can tell apart, either way.
        tokens, second = second, tokens
    elif spoilt == "wrong":
        tokens, second = [token + 5 for token in tokens], tokens
    elif spoilt == "off":
        first_logprob = -0.8
    if faults.answer == "tie":
        second_logprob = -0.501
        first_logprob = -0.5
    told = {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [first_logprob] * count,
        "top_logprobs": [
            {f"token_id:{a}": first_logprob, f"token_id:{b}": second_logprob}
            for a, b in zip(tokens, second, strict=True)
        ],
    }
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
    choice["token_ids"] = tokens
    choice["logprobs"] = told if faults.tells_logprobs else None
    return {"id": "cmpl-x", "object": "text_completion", "choices": [choice]}


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (choice,) = reply["choices"]
    told = choice["logprobs"]
    for place, token in enumerate(choice["token_ids"]):
        part = None
        if told is not None:
            part = {name: values[place : place + 1] for name, values in told.items()}
        one = {**choice, "token_ids": [token], "logprobs": part}
        yield {**reply, "choices": [one]}


class _InLoopServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class FakePair:
    """Both engines, and the real router in front of them."""

    world: World
    prefill: FakeEngine
    decode: FakeEngine
    router_url: str
    _server: _InLoopServer
    _serving: asyncio.Task[None]

    @property
    def faults(self) -> Faults:
        return self.world.faults

    async def stop_router(self) -> None:
        self._server.should_exit = True
        await self._serving


@contextlib.asynccontextmanager
async def fake_pair(mode: str, token: Token | None = None) -> AsyncIterator[FakePair]:
    world = World(mode, token)
    prefill, decode = FakeEngine("prefill", world), FakeEngine("decode", world)
    (port,) = free_ports(1)
    push = mode == "push"
    channel = SideChannel(HOST, prefill.channel) if push else None
    specs = (
        WorkerSpec(
            Role.PREFILL, prefill.address, channel, Address(HOST, prefill.channel)
        ),
        WorkerSpec(Role.DECODE, decode.address, None, Address(HOST, decode.channel)),
    )
    router = Router(RouterConfig(mode=Mode(mode), workers=specs, port=port))
    config = uvicorn.Config(
        build_app(router), host=HOST, port=port, log_level="error", access_log=False
    )
    server = _InLoopServer(config)
    async with contextlib.AsyncExitStack() as stack:
        for engine in (prefill, decode):
            await engine.start()
            stack.push_async_callback(engine.stop)
        serving = asyncio.create_task(server.serve())
        running = FakePair(
            world, prefill, decode, f"http://{HOST}:{port}", server, serving
        )
        stack.push_async_callback(running.stop_router)
        async with asyncio.timeout(20):
            while not (server.started and router.workers.ready()):
                await asyncio.sleep(0.02)
        yield running
