# SPDX-License-Identifier: Apache-2.0
"""Sends the legs of a turn, as a router does or through one, and times them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import aiohttp

from bench_requests import (
    COMPLETIONS,
    Answer,
    Body,
    TurnError,
    completion,
    post,
    read_stream,
    shortened,
    streamed,
)

Mode = Literal["push", "pull"]
Address = tuple[str, int]


@dataclass(frozen=True)
class Endpoint:
    """An engine: its base URL, its side channel and its number of ranks."""

    url: str
    side_channel: Address | None = None
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class Prefill:
    """What a prefill leg told; times are in seconds.

    ``cached`` are the tokens that P neither computed nor will: those of its own
    cache and those it read. ``compute`` begins when P schedules the first token.
    """

    seconds: float
    prompt_tokens: int
    cached: int | None
    compute: float | None


@dataclass(frozen=True)
class Served:
    """One turn as the client saw it.

    ``asked`` is the turn whose KV the prefill leg asked for, ``transfer_id`` what
    this one is called.
    """

    transfer_id: str | None
    asked: str | None
    answer: Answer
    prefill: Prefill | None


class Legs(Protocol):
    """A way to have the turns of one conversation served."""

    async def serve(self, prompt: Sequence[int], tokens: int, *, last: bool) -> Served:
        """Have a turn served.

        Raises:
            TurnError: there is no whole answer.
        """
        ...


class DirectLegs:
    """Sends both legs of each turn itself.

    Args:
        reuse: name the turn before to P, and let D keep what the next one needs.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        mode: Mode,
        prefill: Endpoint,
        decode: Endpoint,
        *,
        reuse: bool,
    ) -> None:
        self._session = session
        self._model = model
        self._mode = mode
        self._prefill = prefill
        self._decode = decode
        self._reuse = reuse
        self._previous: str | None = None

    async def serve(self, prompt: Sequence[int], tokens: int, *, last: bool) -> Served:
        """See :class:`Legs`."""
        transfer_id, previous = uuid.uuid4().hex, self._previous
        first = {
            **completion(self._model, prompt, 1),
            "kv_transfer_params": self._prefill_params(transfer_id, previous),
        }
        keeping: Body = {"retain": self._reuse and not last}
        if previous is not None:
            keeping["release_transfer_id"] = previous
        second = streamed(completion(self._model, prompt, tokens))
        started = time.monotonic()
        if self._mode == "push":
            second["kv_transfer_params"] = {
                **self._registration(transfer_id),
                **keeping,
            }
            prefill, answer = await self._side_by_side(first, second, started)
        else:
            prefill, params = await self._prefill_leg(first)
            second["kv_transfer_params"] = {
                **params,
                "transfer_id": transfer_id,
                "num_receivers": 1,
                **keeping,
            }
            answer = await read_stream(self._session, self._decode.url, second, started)
        self._previous = transfer_id if self._reuse else None
        return Served(transfer_id, previous, answer, prefill)

    async def _side_by_side(
        self, first: Body, second: Body, started: float
    ) -> tuple[Prefill, Answer]:
        try:
            # One leg's failure calls off the other.
            async with asyncio.TaskGroup() as legs:
                prefill = legs.create_task(self._prefill_leg(first))
                decode = legs.create_task(
                    read_stream(self._session, self._decode.url, second, started)
                )
        except ExceptionGroup as group:
            failed, others = group.split(TurnError)
            if failed is None or others is not None:
                raise
            raise TurnError("; ".join(str(e) for e in failed.exceptions)) from group
        return prefill.result()[0], decode.result()

    def _prefill_params(self, transfer_id: str, previous: str | None) -> Body:
        params: Body = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
            "num_receivers": 1,
        }
        if previous is not None:
            host, port = _side_channel(self._decode)
            params |= {
                "retained_transfer_id": previous,
                "remote_host": host,
                "remote_port": port,
            }
        return params

    def _registration(self, transfer_id: str) -> Body:
        host, port = _side_channel(self._prefill)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": None,
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._prefill.tp_size,
            "pp_size": self._prefill.pp_size,
        }

    async def _prefill_leg(self, body: Body) -> tuple[Prefill, Body]:
        started = time.monotonic()
        reply = await post(self._session, self._prefill.url + COMPLETIONS, body)
        seconds = time.monotonic() - started
        usage = reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        metrics = reply.get("metrics") or {}
        compute = metrics.get("time_to_first_token_ms")
        prefill = Prefill(
            seconds,
            usage["prompt_tokens"],
            details.get("cached_tokens"),
            None if compute is None else compute / 1000,
        )
        return prefill, reply.get("kv_transfer_params") or {}


class RoutedLegs:
    """Sends each turn to a router, which does the rest.

    Args:
        conversation: its id for the router; ``None`` makes each turn a request of
            its own, of which nothing is kept.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        url: str,
        conversation: str | None,
    ) -> None:
        self._session = session
        self._model = model
        self._url = url
        self._conversation = conversation

    async def serve(self, prompt: Sequence[int], tokens: int, *, last: bool) -> Served:
        """See :class:`Legs`."""
        body = streamed(completion(self._model, prompt, tokens))
        if self._conversation is not None:
            body["conversation_id"] = self._conversation
        started = time.monotonic()
        answer = await read_stream(self._session, self._url, body, started)
        if last and self._conversation is not None:
            await self._end()
        return Served(None, None, answer, None)

    async def _end(self) -> None:
        url = f"{self._url}/conversations/{self._conversation}"
        async with self._session.delete(url) as response:
            if response.status != 200:
                raise TurnError(
                    f"DELETE {url} answered {response.status}: "
                    f"{shortened(await response.text())}; --router-url must be that "
                    "of the multi-turn router"
                )


def _side_channel(endpoint: Endpoint) -> Address:
    if endpoint.side_channel is None:
        raise TurnError(f"the side channel of {endpoint.url} is not known")
    return endpoint.side_channel
