# SPDX-License-Identifier: Apache-2.0
"""The ways a request takes to the engines: through the router, or leg by leg."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import aiohttp

from bench_requests import Body
from pd_router.config import SideChannel
from pd_router.rewrite import (
    prefill_body,
    prefill_params,
    pull_decode_params,
    push_decode_params,
    with_params,
)
from verify_answers import Answer
from verify_engines import Engine
from verify_http import REQUEST_ID, AskError, Server, ask, events, opened
from verify_result import Unchecked

CONVERSATION_ID = "X-Conversation-Id"

A = TypeVar("A")
B = TypeVar("B")


class Way(Protocol):
    """Gets requests answered by the pair."""

    async def answer(self, body: Body, name: str, conversation: str = "") -> Answer:
        """Have one answered under this request id.

        Raises:
            AskError: it was not.
        """

    async def hang_up(self, body: Body, name: str, after: int) -> int:
        """Have one streamed, and drop the connection after so many events.

        Returns how many there were, which is less if the stream had ended.

        Raises:
            AskError: there is no stream.
        """

    async def forget(self, conversation: str) -> None:
        """The conversation has ended; what is kept of it may go."""


@dataclass(frozen=True)
class RouterWay:
    """Through the router, as clients come."""

    session: aiohttp.ClientSession
    router: Server

    async def answer(self, body: Body, name: str, conversation: str = "") -> Answer:
        """Leave the legs to it."""
        headers = {REQUEST_ID: name}
        if conversation:
            headers[CONVERSATION_ID] = conversation
        return await ask(self.session, self.router, body, headers)

    async def hang_up(self, body: Body, name: str, after: int) -> int:
        """As a client that is killed."""
        headers = {REQUEST_ID: name}
        return await _cut_stream(self.session, self.router, body, headers, after)

    async def forget(self, conversation: str) -> None:
        """Tell it, in case that it remembers conversations."""
        url = f"{self.router.url}/conversations/{conversation}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self.session.delete(url) as response:
                await response.read()


@dataclass(frozen=True)
class Legs:
    """Does for one pair of engines what a router does."""

    session: aiohttp.ClientSession
    mode: str
    prefill: Engine
    decode: Engine

    async def answer(self, body: Body, name: str, conversation: str = "") -> Answer:
        """Both legs of a request."""
        transfer_id = new_transfer_id()
        name = f"{name}-{transfer_id}"
        if self.mode == "push":
            prefill = self.prefill_leg(body, transfer_id, name)
            decode = self.decode_leg(body, transfer_id, name)
            _, answer = await both(prefill, decode)
            return answer
        first = await self.prefill_leg(body, transfer_id, name)
        return await self.decode_leg(body, transfer_id, name, first)

    async def hang_up(self, body: Body, name: str, after: int) -> int:
        """As a router whose client is killed: the prefill leg is over by then."""
        transfer_id = new_transfer_id()
        name = f"{name}-{transfer_id}"
        server, headers = self.decode.server, {REQUEST_ID: name}

        async def cut(first: Answer | None = None) -> int:
            leg = self.decode_body(body, transfer_id, first)
            return await _cut_stream(self.session, server, leg, headers, after)

        prefill = self.prefill_leg(body, transfer_id, name)
        if self.mode == "push":
            return (await both(prefill, cut()))[1]
        return await cut(await prefill)

    async def forget(self, conversation: str) -> None:
        """Nothing is kept: the decode leg asks for that."""

    async def prefill_leg(self, body: Body, transfer_id: str, name: str) -> Answer:
        """Have the prompt computed.

        Raises:
            AskError: it was not, or pull is told of no coordinates.
        """
        leg = with_params(
            {**prefill_body(body), "return_token_ids": True},
            prefill_params(transfer_id, body),
        )
        answer = await ask(self.session, self.prefill.server, leg, {REQUEST_ID: name})
        if self.mode != "push" and answer.params is None:
            raise AskError(
                f"{self.prefill} answered without kv_transfer_params: is it started "
                "with the connector?"
            )
        return answer

    async def decode_leg(
        self, body: Body, transfer_id: str, name: str, first: Answer | None = None
    ) -> Answer:
        """Have the answer made of what the other leg computes, or has computed."""
        return await ask(
            self.session,
            self.decode.server,
            self.decode_body(body, transfer_id, first),
            {REQUEST_ID: name},
        )

    def decode_body(
        self, body: Body, transfer_id: str, first: Answer | None = None
    ) -> Body:
        """The body of the decode leg."""
        params: Mapping[str, Any]
        if self.mode == "push":
            channel = self.prefill.side_channel
            if channel is None:
                raise Unchecked(
                    "push needs the prefill engine's side channel: give --prefill "
                    "URL,HOST:PORT"
                )
            params = push_decode_params(
                transfer_id, SideChannel(channel.host, channel.port)
            )
        else:
            told = {} if first is None else first.params or {}
            params = pull_decode_params(transfer_id, body, told)
        return with_params(body, {**params, "retain": False})


@dataclass(frozen=True)
class InTurn:
    """Uses every pair of several engines, one after the other."""

    ways: tuple[Way, ...]

    async def answer(self, body: Body, name: str, conversation: str = "") -> Answer:
        """Through the pair that the request's name falls to."""
        number = sum(name.encode())
        return await self.ways[number % len(self.ways)].answer(body, name)

    async def hang_up(self, body: Body, name: str, after: int) -> int:
        """On the first pair."""
        return await self.ways[0].hang_up(body, name, after)

    async def forget(self, conversation: str) -> None:
        """Nothing is kept."""


async def _cut_stream(
    session: aiohttp.ClientSession,
    server: Server,
    body: Body,
    headers: Mapping[str, str],
    after: int,
) -> int:
    seen = 0
    async with opened(session, server, {**body, "stream": True}, headers) as response:
        async for _ in events(response):
            seen += 1
            if seen == after:
                break
    return seen


def new_transfer_id() -> str:
    """A name for one dispatch."""
    return uuid.uuid4().hex


async def both(
    prefill: Coroutine[Any, Any, A], decode: Coroutine[Any, Any, B]
) -> tuple[A, B]:
    """Run both legs; where one fails, hang up on the other.

    Raises:
        AskError: of the leg that failed first.
    """
    first, second = asyncio.create_task(prefill), asyncio.create_task(decode)
    try:
        return await asyncio.gather(first, second)
    finally:
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


def legs_of(
    session: aiohttp.ClientSession,
    mode: str,
    prefill: list[Engine],
    decode: list[Engine],
) -> tuple[Legs, ...]:
    """Every pair of these engines."""
    one = Legs(session, mode, prefill[0], decode[0])
    return tuple(
        replace(one, prefill=source, decode=sink)
        for source in prefill
        for sink in decode
    )
