# SPDX-License-Identifier: Apache-2.0
"""The engines under verification, and what they tell of themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

import verify_side_channel
from pd_router.config import Address
from pd_router.side_channel import SideChannelClient, Token
from sweep_proof import State, parse_metrics
from verify_http import AskError, Server, ask, get, get_page, greedy
from verify_result import Unchecked

KEPT_BLOCKS = "vllm:nixl_retained_blocks"
POLL_S = 0.1
ANSWER_S = 5.0

_MAX_REPORT_BYTES = 16 << 20
_WAITING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_USAGE = "vllm:kv_cache_usage_perc"
_HELD = ("vllm:nixl_quarantined_blocks", "vllm:nixl_transfer_queue_depth")
_RETAINED = "retained"
# What is kept for later turns has entries in these tables, of the engine and of ranks.
_KEPT_TABLES = ("retained", "kept")
# A prompt of one token gives an engine a step to report in.
_NUDGE = (5,)


@dataclass(frozen=True)
class Engine:
    """One engine, or one data-parallel rank of a server of several."""

    role: str
    server: Server
    side_channel: Address | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.server}"


@dataclass(frozen=True)
class Told:
    """What all engines told at one moment; ``nudges`` were sent to each till then."""

    states: Mapping[Engine, State]
    nudges: int = 0

    def of(self, role: str) -> list[State]:
        """States of the engines of a role; of one server, one."""
        found = {e.server.url: s for e, s in self.states.items() if e.role == role}
        return list(found.values())

    def nudged(self, role: str) -> int:
        """How many requests of one token each its engines got from us till then."""
        return self.nudges * sum(engine.role == role for engine in self.states)

    def records(self, role: str, handoff_role: str) -> list[Mapping[str, Any]]:
        """Hand-offs that engines of a role finished, as they saw them."""
        return [
            record
            for engine, state in self.states.items()
            if engine.role == role
            for record in state.handoffs
            if record["role"] == handoff_role
        ]


@dataclass
class Engines:
    """Prefill and decode engines of one deployment."""

    session: aiohttp.ClientSession
    model: str
    engines: Sequence[Engine]
    token: Token | None = None
    nudges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._side_channels = SideChannelClient(
            self.token, max_bytes=_MAX_REPORT_BYTES, seconds=ANSWER_S
        )

    def close(self) -> None:
        """Close what questions have opened."""
        self._side_channels.close()

    def of(self, role: str) -> list[Engine]:
        """The engines of a role."""
        return [engine for engine in self.engines if engine.role == role]

    @property
    def without_side_channel(self) -> list[Engine]:
        """Those that cannot be asked over it, because it is not known."""
        return [engine for engine in self.engines if engine.side_channel is None]

    @property
    def have_side_channels(self) -> bool:
        """Whether all of them can be asked."""
        return not self.without_side_channel

    async def health(self) -> list[str]:
        """What is wrong with them; nothing if all answer."""
        return [
            problem
            for problem in await asyncio.gather(
                *(healthy(self.session, e.server.url, str(e)) for e in self.engines)
            )
            if problem
        ]

    async def integrity(self, engine: Engine) -> dict[str, Any]:
        """What holds an engine's blocks.

        Raises:
            Unchecked: its side channel is not known, or does not answer.
        """
        if engine.side_channel is None:
            raise Unchecked(f"the side channel of {engine} is not given")
        return await verify_side_channel.integrity(
            self._side_channels, engine.side_channel
        )

    async def told(self) -> Told:
        """What all tell now.

        Raises:
            AskError: an engine does not answer.
            Unchecked: a side channel does not.
        """
        states = await asyncio.gather(*(self._state(e) for e in self.engines))
        return Told(dict(zip(self.engines, states, strict=True)), self.nudges)

    async def nudge(self) -> None:
        """Let each do a step, for they tell what a step did in the next one.

        Raises:
            AskError: one does not work.
        """
        body = greedy(self.model, _NUDGE, "nudge", 1)
        self.nudges += 1
        await asyncio.gather(
            *(ask(self.session, engine.server, body) for engine in self.engines)
        )

    async def held(self, seconds: float) -> list[str]:
        """What is still held once nothing should be, or when time is up.

        Raises:
            AskError: an engine does not answer.
            Unchecked: what an engine holds cannot be known.
        """
        deadline = time.monotonic() + seconds
        while True:
            await self.nudge()
            await asyncio.sleep(POLL_S)
            found = await asyncio.gather(*(self._held(e) for e in self.engines))
            problems = [problem for problem in found if problem]
            if not problems or time.monotonic() > deadline:
                return problems
            await asyncio.sleep(POLL_S)

    async def _held(self, engine: Engine) -> str:
        if engine.side_channel is not None:
            return _held(engine, await self.integrity(engine))
        state = parse_metrics(
            await get_page(self.session, f"{engine.server.url}/metrics")
        )
        if _USAGE not in state.samples:
            raise Unchecked(f"{engine} tells no {_USAGE}, and has no side channel here")
        found = {name: state.sample(name) for name in (_USAGE, *_HELD)}
        if state.sample(KEPT_BLOCKS):
            del found[_USAGE]
        told = ", ".join(
            f"{name} is {value:g}" for name, value in found.items() if value
        )
        return f"{engine}: {told}" if told else ""

    async def _state(self, engine: Engine) -> State:
        page = await get_page(self.session, f"{engine.server.url}/metrics")
        state = parse_metrics(page)
        if engine.side_channel is None:
            return state
        document = await self.integrity(engine)
        records = await verify_side_channel.handoffs(
            self._side_channels, engine.side_channel
        )
        return replace(state, counters=document["counters"], handoffs=records)


def busy(states: Iterable[State]) -> float:
    """How many requests run or wait there."""
    return sum(state.sample(name) for state in states for name in _WAITING)


async def healthy(session: aiohttp.ClientSession, url: str, name: str) -> str:
    """Why a server is not healthy; empty if it is."""
    try:
        status, _ = await get(session, f"{url}/health")
    except AskError as error:
        return f"{name}: {error}"
    return "" if status == 200 else f"{name}: /health answered {status}"


def retained(document: Mapping[str, Any]) -> int:
    """Blocks that are kept for later turns of conversations, as configured."""
    kept: int = document["pins"].get(_RETAINED, 0)
    return kept


def _held(engine: Engine, document: Mapping[str, Any]) -> str:
    kept = retained(document)
    pins = {k: n for k, n in document["pins"].items() if n and k != _RETAINED}
    tables = {
        name: n
        for name, n in document["tables"].items()
        if n and not (kept and name.endswith(_KEPT_TABLES))
    }
    missing = document["total_blocks"] - document["free_blocks"]
    if not pins and not tables and (missing == 0 or (kept and missing <= kept)):
        return ""
    return (
        f"{engine}: {document['free_blocks']} of {document['total_blocks']} blocks are "
        f"free, held by {pins or 'nobody known'}, tables {tables or 'empty'}"
    )
