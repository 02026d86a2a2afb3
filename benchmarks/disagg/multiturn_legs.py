# SPDX-License-Identifier: Apache-2.0
"""Sends the legs of a turn, as a router does or through one, and times them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp

Mode = Literal["push", "pull"]
Address = tuple[str, int]
Body = dict[str, Any]

COMPLETIONS = "/v1/completions"
_SHOWN_CHARACTERS = 500


class TurnError(RuntimeError):
    """A turn did not end in a whole answer; the text holds the reply."""


@dataclass(frozen=True)
class Endpoint:
    """An engine: its base URL, its side channel and its number of ranks."""

    url: str
    side_channel: Address | None = None
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class Answer:
    """A streamed answer; times are in seconds since the turn was sent."""

    tokens: tuple[int, ...]
    ttft: float
    total: float


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
            **_completion(self._model, prompt, 1),
            "kv_transfer_params": self._prefill_params(transfer_id, previous),
        }
        keeping: Body = {"retain": self._reuse and not last}
        if previous is not None:
            keeping["release_transfer_id"] = previous
        second = _streamed(_completion(self._model, prompt, tokens))
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
        body = _streamed(_completion(self._model, prompt, tokens))
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
                    f"{_shortened(await response.text())}; --router-url must be that "
                    "of the multi-turn router"
                )


def new_session(timeout: float) -> aiohttp.ClientSession:
    """A session whose every request ends within ``timeout`` seconds."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout),
        # Engines close idle connections; a new one for each request meets no race.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        # A stream's first event repeats the prompt, on one line.
        read_bufsize=1 << 23,
    )


async def post(session: aiohttp.ClientSession, url: str, body: Body) -> Body:
    """Send a request and read its JSON.

    Raises:
        TurnError: another status than 200, no JSON object, or no answer in time.
    """
    try:
        async with session.post(url, json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise TurnError(f"{url} answered {response.status}: {_shortened(text)}")
            reply = json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise TurnError(f"{url} gave no answer: {error!r}") from error
    if not isinstance(reply, dict):
        raise TurnError(f"{url} answered no object: {_shortened(text)}")
    return reply


async def read_stream(
    session: aiohttp.ClientSession, url: str, body: Body, started: float
) -> Answer:
    """Send a streaming request and read its tokens.

    ``started`` is the monotonic time at which the turn began.

    Raises:
        TurnError: as :func:`post`, an error event, or fewer tokens than asked for.
    """
    tokens: list[int] = []
    ttft = 0.0
    at = url + COMPLETIONS
    try:
        async with session.post(at, json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise TurnError(f"{at} answered {response.status}: {_shortened(text)}")
            async for event in _events(response):
                if "error" in event:
                    raise TurnError(f"{at} ended a stream with {event['error']}")
                for choice in event.get("choices", ()):
                    found = choice.get("token_ids") or ()
                    if found and not tokens:
                        ttft = time.monotonic() - started
                    tokens += found
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise TurnError(f"{at} broke off: {error!r}") from error
    if len(tokens) != body["max_tokens"]:
        raise TurnError(
            f"{at} streamed {len(tokens)} token ids, expected {body['max_tokens']}"
        )
    return Answer(tuple(tokens), ttft, time.monotonic() - started)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    async for raw in response.content:
        field, _, value = raw.decode().rstrip("\r\n").partition(":")
        data = value.removeprefix(" ")
        if field == "data" and data != "[DONE]":
            yield json.loads(data)


def _completion(model: str, prompt: Sequence[int], tokens: int) -> Body:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _streamed(body: Body) -> Body:
    return {**body, "stream": True, "return_token_ids": True}


def _side_channel(endpoint: Endpoint) -> Address:
    if endpoint.side_channel is None:
        raise TurnError(f"the side channel of {endpoint.url} is not known")
    return endpoint.side_channel


def _shortened(text: str) -> str:
    return text[:_SHOWN_CHARACTERS]
