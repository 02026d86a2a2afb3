# SPDX-License-Identifier: Apache-2.0
"""Sends completions to engines and times the tokens that come back."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

Body = dict[str, Any]

COMPLETIONS = "/v1/completions"
_SHOWN_CHARACTERS = 500


class TurnError(RuntimeError):
    """A turn did not end in a whole answer; the text holds the reply."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer; times are in seconds since the turn was sent."""

    tokens: tuple[int, ...]
    ttft: float
    total: float


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
                raise TurnError(f"{url} answered {response.status}: {shortened(text)}")
            reply = json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise TurnError(f"{url} gave no answer: {error!r}") from error
    if not isinstance(reply, dict):
        raise TurnError(f"{url} answered no object: {shortened(text)}")
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
                raise TurnError(f"{at} answered {response.status}: {shortened(text)}")
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


def completion(model: str, prompt: Sequence[int], tokens: int) -> Body:
    """The body of a request for exactly so many tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def streamed(body: Body) -> Body:
    """The same, answered token by token, as :func:`read_stream` needs it."""
    return {**body, "stream": True, "return_token_ids": True}


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    async for raw in response.content:
        field, _, value = raw.decode().rstrip("\r\n").partition(":")
        data = value.removeprefix(" ")
        if field == "data" and data != "[DONE]":
            yield json.loads(data)


def shortened(text: str) -> str:
    """The start of a reply, for an error's text."""
    return text[:_SHOWN_CHARACTERS]
