# SPDX-License-Identifier: Apache-2.0
"""A hand-off in push whose decode engine stops or is full is taken by another one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

import kv_integrity
from handoff_client import (
    CLEAN_TIMEOUT_S,
    NUDGE_EVERY_S,
    POLL_S,
    Body,
    Client,
    Reply,
    completion,
    handoffs,
    side_channel_address,
)
from handoff_engines import SPEC, EngineRoom
from handoff_workload import Ask, Tokens, words
from pd_launcher import Engine, Router
from tiny_model import random_prompt

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(400, func_only=True),
]

WAIT_S = 30.0
NARROW = ("push-decode-narrow-1", "push-decode-narrow-2")
FLAGS = (
    "--rebind-after=0.2",
    "--health-interval=0.2",
    "--health-timeout=2",
)


@dataclass(frozen=True)
class Crew:
    """One prefill engine, two decode engines of one slot each, and their router."""

    client: Client
    prefill: Engine
    decode: list[Engine]
    router: Router

    async def ask(self, name: str, body: Body) -> Reply:
        return await self.client.post(self.router, body, headers={"X-Request-Id": name})

    async def outcomes(self, engine: Engine, name: str) -> list[str]:
        """How the hand-offs of a request have ended at an engine."""
        records = await handoffs(engine)
        return [r["outcome"] for r in records if f"{name}-" in r["request_id"]]

    async def served(self, name: str) -> None:
        """Wait until the prefill engine has closed a request's only hand-off, well."""
        deadline = time.monotonic() + WAIT_S
        while not (found := await self.outcomes(self.prefill, name)):
            # It may still write to one that was stopped, and sleeps when it has ended.
            assert time.monotonic() < deadline, f"{name} is open at P"
            await self.client.nudge(self.prefill)
            await asyncio.sleep(POLL_S)
        assert found == ["served"]

    async def busy(self, *numbers: int) -> None:
        """Wait until the decode engines run so many requests of the router."""
        deadline = time.monotonic() + WAIT_S
        while (found := await self.load()) != list(numbers):
            assert time.monotonic() < deadline, f"{found}, expected {numbers}"
            await asyncio.sleep(0.01)

    async def load(self) -> list[int]:
        state = await self.client.get(self.router, "/status")
        by_address = {w["address"]: w["outstanding"] for w in state.body["workers"]}
        return [by_address[engine.address] for engine in self.decode]

    async def rebinds(self) -> float:
        return (await self.client.metrics(self.router)).get(
            "pd_router_rebinds_total", 0
        )

    async def alone(self, engine: Engine, body: Body) -> Tokens:
        """The answer of one engine, of nothing that a hand-off has left there."""
        reply = await self.client.post(engine, {**body, "cache_salt": "own"})
        return reply.tokens


@pytest_asyncio.fixture
async def crew(room: EngineRoom, client: Client) -> AsyncIterator[Crew]:
    prefill, decode, router = room.crew("push", "push-prefill", NARROW, FLAGS)
    yield Crew(client, prefill, decode, router)
    for engine in (prefill, *decode):
        deadline = time.monotonic() + CLEAN_TIMEOUT_S
        while True:
            await client.nudge(engine)
            document = await asyncio.to_thread(
                kv_integrity.wait_released, side_channel_address(engine), NUDGE_EVERY_S
            )
            if kv_integrity.released(document):
                break
            assert time.monotonic() < deadline, f"{engine.name} holds: {document}"
        assert not any(document["pins"].values()), f"{engine.name}: {document}"


def _body(tokens: int, answer: int) -> Body:
    prompt = tuple(random_prompt(tokens, random.Random(f"{tokens} {answer}"), SPEC))
    return completion(Ask(prompt, answer), ignore_eos=True)


async def test_a_decode_engine_that_stops_is_left_for_another(crew: Crew) -> None:
    body = _body(3000, 8)
    before = await crew.rebinds()
    asking = asyncio.create_task(crew.ask("stopped", body))
    while not any(load := await crew.load()):
        await asyncio.sleep(POLL_S / 10)
    first, second = sorted(crew.decode, key=lambda e: -load[crew.decode.index(e)])
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        reply = await asyncio.wait_for(asking, WAIT_S)
    finally:
        os.killpg(first.pid, signal.SIGCONT)

    assert reply.tokens == await crew.alone(second, body)
    assert await crew.rebinds() == before + 1
    assert await crew.outcomes(second, "stopped") == ["received"]
    # One prompt, computed once.
    await crew.served("stopped")
    await crew.busy(0, 0)


async def test_a_decode_engine_that_is_full_is_left_for_another(crew: Crew) -> None:
    # Both must still run when the third one comes.
    long, short, third = _body(64, 1500), _body(65, 250), _body(66, 8)
    for number in range(len(crew.decode)):
        await crew.ask(f"meet-{number}", _body(68 + number, 1))
    await crew.busy(0, 0)
    before = await crew.rebinds()
    order: list[str] = []
    begun = {name: asyncio.Event() for name in ("long", "short", "third")}

    async def stream(name: str, body: Body) -> Tokens:
        headers = {"X-Request-Id": name}
        text = await crew.client.stream(
            crew.router, body, headers=headers, begun=begun[name]
        )
        order.append(name)
        return words(text)

    asking = [asyncio.create_task(stream("long", long))]
    while sum(load := await crew.load()) != 1:
        await asyncio.sleep(POLL_S / 10)
    full = crew.decode[load.index(1)]
    other = crew.decode[1 - load.index(1)]
    # An engine that has yet to run the first one takes the next one's KV as well.
    await asyncio.wait_for(begun["long"].wait(), WAIT_S)
    asking.append(asyncio.create_task(stream("short", short)))
    await asyncio.wait_for(begun["short"].wait(), WAIT_S)
    # Equally busy by number, so it goes where nobody has gone for longer.
    asking.append(asyncio.create_task(stream("third", third)))
    replies = await asyncio.gather(*asking)

    # Mostly the short one is the first to end. Where its engine gets too little of the
    # processor for that, the third one goes to the engine that is free first as well.
    assert order.index("third") == 1, order
    free, busy = (other, full) if order[0] == "short" else (full, other)
    assert await crew.rebinds() > before
    assert await crew.outcomes(free, "third") == ["received"]
    assert "received" not in await crew.outcomes(busy, "third")
    await crew.served("third")
    for reply, body in zip(replies, (long, short, third), strict=True):
        assert reply == await crew.alone(other, body)


async def test_a_decode_engine_that_others_fill_keeps_nobody_waiting(
    crew: Crew,
) -> None:
    filled, other = crew.decode
    before = await crew.rebinds()
    order: list[str] = []
    begun = asyncio.Event()

    async def past_the_router() -> None:
        await crew.client.stream(filled, _body(67, 1500), begun=begun)
        order.append("theirs")

    holding = asyncio.create_task(past_the_router())
    await asyncio.wait_for(begun.wait(), WAIT_S)
    bodies = {f"ours-{number}": _body(68 + number, 8) for number in range(4)}
    for name, body in bodies.items():
        text = await asyncio.wait_for(
            crew.client.stream(crew.router, body, headers={"X-Request-Id": name}),
            WAIT_S,
        )
        order.append(name)
        assert await crew.outcomes(other, name) == ["received"]
        assert words(text) == await crew.alone(other, body)
    await holding

    # To the router the two are equally busy: it does not know of the others.
    assert order == [*bodies, "theirs"]
    assert await crew.rebinds() > before
