# SPDX-License-Identifier: Apache-2.0
"""Asks servers for greedy answers, with the probabilities that they gave them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench_requests import COMPLETIONS, Body, shortened
from verify_answers import Answer
from verify_prompts import ANSWER_TOKENS, Tokens

REQUEST_ID = "X-Request-Id"
DP_RANK = "X-data-parallel-rank"
LIKELIEST = 5

_ID_PREFIX = "token_id:"


class AskError(RuntimeError):
    """A request did not end in a whole answer; the text holds what came.

    ``status`` is that of HTTP, ``None`` where there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Server:
    """Something that serves completions.

    ``dp_rank`` is the data-parallel rank that is meant behind it, if any.
    """

    url: str
    dp_rank: int | None = None

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Headers of a request to it."""
        rank = {} if self.dp_rank is None else {DP_RANK: str(self.dp_rank)}
        return {**(more or {}), **rank}

    def __str__(self) -> str:
        return self.url if self.dp_rank is None else f"{self.url} rank {self.dp_rank}"


def greedy(model: str, prompt: Tokens, salt: str, tokens: int = ANSWER_TOKENS) -> Body:
    """The body of a request whose answer can be compared.

    Prompts of another ``salt`` find nothing of this one in any prefix cache.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


async def ask(
    session: aiohttp.ClientSession,
    server: Server,
    body: Body,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request and read its answer, event by event if it is streamed.

    Raises:
        AskError: another status than 200, an error event, or no whole answer.
    """
    began = time.monotonic()
    async with opened(session, server, body, headers) as response:
        if not body.get("stream"):
            reply = json.loads(await response.text())
            return _answer([reply], time.monotonic() - began)
        found: list[Body] = []
        first = 0.0
        async for event in events(response):
            first = first or time.monotonic() - began
            found.append(event)
        return _answer(found, first)


@asynccontextmanager
async def opened(
    session: aiohttp.ClientSession,
    server: Server,
    body: Body,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A response of status 200; leaving the block before its end hangs up.

    Raises:
        AskError: another status, a broken connection, what is no answer, or the
            session's time has passed; in the block, too.
    """
    url = server.url + COMPLETIONS
    try:
        async with session.post(
            url, json=body, headers=server.headers(headers)
        ) as response:
            if response.status != 200:
                text = shortened(await response.text())
                raise AskError(
                    f"{url} answered {response.status}: {text}", response.status
                )
            try:
                yield response
            finally:
                if not response.content.at_eof():
                    response.close()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AskError(f"{url} gave no whole answer: {why(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise AskError(f"{url} gave what is no answer: {error!r}") from error


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    """The events of a stream up to its end.

    Raises:
        AskError: one is an error, or the stream ends without saying so.
    """
    ended = False
    async for raw in response.content:
        name, _, value = raw.decode().strip().partition(":")
        if ended or name != "data":
            continue
        if value.strip() == "[DONE]":
            # Read on: whoever leaves the last bytes unread is taken for a client
            # that has hung up.
            ended = True
            continue
        event = json.loads(value)
        if "error" in event:
            raise AskError(f"{response.url} ended a stream with {event['error']}")
        yield event
    if not ended:
        raise AskError(f"{response.url} ended a stream without [DONE]")


def why(error: Exception) -> str:
    """Why there was no answer, in words for somebody who operates the server."""
    if isinstance(error, TimeoutError):
        return "timed out"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, socket.gaierror):
        return f"its name is not known ({cause.strerror})"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(cause) or type(cause).__name__


async def get(
    session: aiohttp.ClientSession, url: str, seconds: float = 10.0
) -> tuple[int, str]:
    """Status and text of a page.

    Raises:
        AskError: there is none within ``seconds``.
    """
    try:
        async with (
            asyncio.timeout(seconds),
            session.get(url) as response,
        ):
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AskError(f"{url} did not answer: {why(error)}") from error


async def get_page(session: aiohttp.ClientSession, url: str) -> str:
    """A page's text.

    Raises:
        AskError: no answer, or another status than 200.
    """
    status, text = await get(session, url)
    if status != 200:
        raise AskError(f"{url} answered {status}: {shortened(text)}", status)
    return text


async def get_object(session: aiohttp.ClientSession, url: str) -> Body:
    """A page that is a JSON object; raises as :func:`get_page`."""
    text = await get_page(session, url)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise AskError(f"{url} answered no JSON: {shortened(text)}") from error
    if not isinstance(value, dict):
        raise AskError(f"{url} answered no object: {shortened(text)}")
    return value


async def tokenize(
    session: aiohttp.ClientSession, url: str, model: str, text: str
) -> Tokens | None:
    """Ids of a text, where the server tokenizes.

    Raises:
        AskError: no answer.
    """
    at = f"{url}/tokenize"
    try:
        async with session.post(at, json={"model": model, "prompt": text}) as response:
            if response.status != 200:
                return None
            return tuple((await response.json())["tokens"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AskError(f"{at} did not answer: {why(error)}") from error
    except (ValueError, KeyError, TypeError):
        return None


def _answer(parts: list[Body], seconds: float) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[Mapping[int, float]] = []
    params: Any = None
    for part in parts:
        params = part.get("kv_transfer_params") or params
        for choice in part.get("choices", ()):
            told = choice.get("logprobs") or {}
            ids = choice.get("token_ids")
            if ids is None:
                ids = [_token(name) for name in told["tokens"]]
            tokens += ids
            logprobs += told.get("token_logprobs") or ()
            top += [_likeliest(place) for place in told.get("top_logprobs") or ()]
    if not tokens:
        raise ValueError("it has no token ids")
    return Answer(tuple(tokens), tuple(logprobs), tuple(top), seconds, params)


def _likeliest(place: Mapping[str, float] | None) -> Mapping[int, float]:
    return {_token(name): value for name, value in (place or {}).items()}


def _token(name: str) -> int:
    if not name.startswith(_ID_PREFIX):
        raise ValueError(
            f"{name!r} is no token id: it wants return_tokens_as_token_ids"
        )
    return int(name.removeprefix(_ID_PREFIX))
