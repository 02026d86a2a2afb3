# SPDX-License-Identifier: Apache-2.0
"""A router between the two doubles, and a client in front of it."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pd_processes import ServerProcess, free_ports, wait_all_ready
from router_contract.engines import (
    COMPLETIONS,
    HOST,
    MODEL,
    DecodeDouble,
    Handoffs,
    PrefillDouble,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode

READY_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 30.0
ENDED_TIMEOUT_S = 10.0
"""How long a leg may go on after the other has failed or the client has gone."""

PROMPT = "one two three four five six seven eight nine ten " * 60
"""Long enough that no router computes it on D for being short."""

EXAMPLES = Path(__file__).parents[5] / "examples/disaggregated/disaggregated_serving"

PLACES = (
    "port",
    "model",
    "prefill",
    "decode",
    "prefill_port",
    "decode_port",
    "prefill_side_channel",
    "prefill_side_channel_port",
    "decode_side_channel",
    "decode_side_channel_port",
)
"""What a router's command may name in braces."""


@dataclass(frozen=True)
class RouterSpec:
    """A router to be tested.

    Attributes:
        command: starts it; see :data:`PLACES`. Empty: it runs already, at ``url``.
        conversations: whether it lets P read back what D keeps of a turn before.
        waived: names of checks that it is known not to pass.
        ports: of P, D and their side channels, where it is set to fixed ones.
    """

    name: str
    mode: Mode
    command: str = ""
    conversations: bool = False
    url: str = ""
    waived: frozenset[str] = frozenset()
    ports: tuple[int, int, int, int] | None = None
    ready_path: str = "/health"


def _ours(script: str, options: str) -> str:
    program = shlex.join([sys.executable, str(EXAMPLES / script)])
    return (
        f"{program} --port {{port}} --model {{model}} --prefill {{prefill}} "
        f"--decode {{decode}} --decode-side-channel {{decode_side_channel}} "
        f"--health-interval 0.2 {options}"
    )


_TO_PUSH = "--prefill-side-channel-port {prefill_side_channel_port}"
OURS = (
    RouterSpec(
        "push",
        Mode.PUSH,
        _ours("disagg_proxy_pushconnector_demo.py", _TO_PUSH),
        ready_path="/ready",
    ),
    RouterSpec(
        "pull", Mode.PULL, _ours("disagg_proxy_demo.py", ""), ready_path="/ready"
    ),
    RouterSpec(
        "multiturn-push",
        Mode.PUSH,
        _ours("disagg_proxy_multiturn.py", f"--mode push {_TO_PUSH}"),
        conversations=True,
        ready_path="/ready",
    ),
    RouterSpec(
        "multiturn-pull",
        Mode.PULL,
        _ours("disagg_proxy_multiturn.py", "--mode pull"),
        conversations=True,
        ready_path="/ready",
    ),
)


@dataclass
class Got:
    """What the client was answered; ``error`` is why it got no whole answer."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""

    @property
    def json(self) -> dict[str, Any]:
        """The body of a whole answer."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        assert isinstance(value, dict), f"no JSON object: {self}"
        return value

    @property
    def texts(self) -> list[str]:
        """The choices' texts of a whole answer, by their index."""
        assert self.status == 200, f"the router answered {self}"
        found: dict[int, str] = {}
        for choice in self.json["choices"]:
            message = choice.get("message")
            text = choice["text"] if message is None else message["content"]
            found[choice["index"]] = text
        return [found[index] for index in sorted(found)]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, without its last one."""
        values = [line[6:] for line in self._lines if line != "data: [DONE]"]
        return [json.loads(value) for value in values]

    @property
    def streamed(self) -> dict[int, str]:
        """The choices' texts of a stream, by their index."""
        found: dict[int, str] = {}
        for value in self.events:
            for choice in value.get("choices", ()):
                delta = choice.get("delta")
                text = choice.get("text") if delta is None else delta.get("content")
                found[choice["index"]] = found.get(choice["index"], "") + (text or "")
        return found

    @property
    def done(self) -> bool:
        """Whether a stream came to its end without an error."""
        told = any("error" in value for value in self.events)
        return not self.error and not told and "data: [DONE]" in self._lines

    @property
    def _lines(self) -> list[str]:
        lines = self.body.decode().splitlines()
        return [line for line in lines if line.startswith("data: ")]


class Bench:
    """The doubles, the router's address and a client."""

    def __init__(
        self,
        spec: RouterSpec,
        url: str,
        prefill: PrefillDouble,
        decode: DecodeDouble,
        session: aiohttp.ClientSession,
    ) -> None:
        self.spec = spec
        self.url = url
        self.prefill = prefill
        self.decode = decode
        self.session = session

    @property
    def mode(self) -> Mode:
        """Who moves the KV."""
        return self.spec.mode

    async def post(
        self,
        body: Mapping[str, Any] | None = None,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
    ) -> Got:
        """Send a request and read what comes of it, whole or not."""
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, **(body or {})}
        if "messages" in asked:
            del asked["prompt"]
        got = Got(0)
        try:
            async with self.session.post(
                self.url + path, json=asked, headers=headers
            ) as response:
                got.status, got.headers = response.status, response.headers
                async for data in response.content.iter_any():
                    got.body += data
        except (aiohttp.ClientError, TimeoutError) as error:
            got.error = repr(error)
        return got

    async def settle(self) -> None:
        """Begin anew: engines that serve, and a router that uses them.

        A router may have taken an engine that failed out of its choice.
        """
        for engine in (self.prefill, self.decode):
            engine.forget()
        got = Got(0)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while got.status != 200:
                    got = await self.post({"prompt": PROMPT + "ready"})
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise AssertionError(
                f"{self.url} serves nothing for {READY_TIMEOUT_S:g} s; the engines are "
                f"up, their model is {MODEL!r}, and the router's last answer: {got}"
            ) from error
        for engine in (self.prefill, self.decode):
            for leg in engine.legs:
                await asyncio.wait_for(leg.ended.wait(), ENDED_TIMEOUT_S)
            engine.forget()


@asynccontextmanager
async def doubles(
    mode: Mode,
    ports: tuple[int, int, int, int] | None = None,
    *,
    side_channels: bool = True,
) -> AsyncIterator[tuple[PrefillDouble, DecodeDouble]]:
    """Both engines, listening."""
    prefill_port, decode_port, prefill_side, decode_side = ports or free_ports(4)
    handoffs = Handoffs()
    async with AsyncExitStack() as stack:
        prefill = PrefillDouble(mode, handoffs, prefill_port, prefill_side)
        decode = DecodeDouble(mode, handoffs, decode_port, decode_side)
        for engine in (prefill, decode):
            stack.callback(engine.close)
            if side_channels:
                engine.open()
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield prefill, decode


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client each of whose requests has a connection of its own and a deadline."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REPLY_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    ) as session:
        yield session


@asynccontextmanager
async def running(spec: RouterSpec, log_dir: Path) -> AsyncIterator[Bench]:
    """The router and all that it needs.

    Raises:
        StartError: the router's command ended, or it did not answer in time.
        ValueError: its command names an unknown place.
    """
    async with doubles(spec.mode, spec.ports) as (prefill, decode), client() as session:
        if not spec.command:
            yield Bench(spec, spec.url.rstrip("/"), prefill, decode, session)
            return
        (port,) = free_ports(1)
        server = ServerProcess(
            f"{spec.name} router",
            shlex.split(command_line(spec.command, port, prefill, decode)),
            port=port,
            log_path=log_dir / f"{spec.name}.log",
            ready_path=spec.ready_path,
        )
        try:
            server.start()
            await asyncio.to_thread(wait_all_ready, [server], READY_TIMEOUT_S)
            yield Bench(spec, server.url, prefill, decode, session)
        finally:
            await asyncio.to_thread(server.stop)


def command_line(
    template: str, port: int, prefill: PrefillDouble, decode: DecodeDouble
) -> str:
    """The command with all places filled in.

    Raises:
        ValueError: a place has another name.
    """
    channels = {
        f"{role}_side_channel{end}": value
        for role, engine in (("prefill", prefill), ("decode", decode))
        for end, value in (
            ("", f"{HOST}:{engine.side_channel[1]}"),
            ("_port", str(engine.side_channel[1])),
        )
    }
    try:
        return template.format(
            port=port,
            model=MODEL,
            prefill=f"{HOST}:{prefill.port}",
            decode=f"{HOST}:{decode.port}",
            prefill_port=prefill.port,
            decode_port=decode.port,
            **channels,
        )
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"--router-command {template!r} names {error}; it may name "
            f"{', '.join('{' + place + '}' for place in PLACES)}"
        ) from error
