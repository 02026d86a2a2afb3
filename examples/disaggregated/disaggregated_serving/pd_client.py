# SPDX-License-Identifier: Apache-2.0
"""A small client of the OpenAI endpoints that times what it receives."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class RequestError(RuntimeError):
    """A request did not end in a whole answer; the text holds the reply."""


@dataclass(frozen=True)
class Ask:
    """One greedy request: a chat with one message, or a completion."""

    title: str
    text: str
    max_tokens: int
    chat: bool = False
    stream: bool = True

    def path(self) -> str:
        """Return the endpoint's path."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the request's JSON body."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.stream,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.text}]
        else:
            body["prompt"] = self.text
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass(frozen=True)
class Answer:
    """What came back; times are in seconds since the request was sent.

    ``ttft`` is the time to the first text and ``tpot`` the mean time of each
    further token; both are ``None`` where the answer came in one piece.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    total: float
    ttft: float | None
    tpot: float | None


def send(host: str, port: int, model: str, ask: Ask, timeout: float) -> Answer:
    """Send a request and read its answer to the end.

    Raises:
        RequestError: another status than 200, an error in the stream, no text or
            usage, a broken connection, or ``timeout`` seconds passed.
    """
    started = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(
            "POST",
            ask.path(),
            body=json.dumps(ask.body(model)),
            headers={"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            reply = response.read(4096).decode("utf-8", errors="replace")
            raise RequestError(f"{ask.path()} answered {response.status}: {reply}")
        if ask.stream:
            return _read_stream(response, started, timeout)
        return _read_whole(json.loads(response.read()), started)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(
            f"{ask.path()} on {host}:{port} failed after "
            f"{time.monotonic() - started:.1f} s: {error!r}"
        ) from error
    finally:
        connection.close()


def _read_whole(reply: dict[str, Any], started: float) -> Answer:
    total = time.monotonic() - started
    choice = reply["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    usage = reply["usage"]
    return Answer(
        text=text,
        finish_reason=str(choice["finish_reason"]),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total=total,
        ttft=None,
        tpot=None,
    )


def _read_stream(
    response: http.client.HTTPResponse, started: float, timeout: float
) -> Answer:
    parts: list[str] = []
    finish_reason = ""
    usage: dict[str, Any] | None = None
    first = last = 0.0
    for event in _events(response):
        now = time.monotonic() - started
        if now > timeout:
            raise RequestError(f"the stream did not end within {timeout:.0f} s")
        if "error" in event:
            raise RequestError(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            if text:
                first = first or now
                last = now
                parts.append(text)
    if usage is None or not parts or not finish_reason:
        raise RequestError(
            f"the stream ended early: {len(parts)} pieces of text, finish reason "
            f"{finish_reason!r}, usage {usage!r}"
        )
    tokens = usage["completion_tokens"]
    return Answer(
        text="".join(parts),
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=tokens,
        total=time.monotonic() - started,
        ttft=first,
        tpot=(last - first) / (tokens - 1) if tokens > 1 else None,
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        field, _, value = line.decode("utf-8").rstrip("\r\n").partition(":")
        data = value.removeprefix(" ")
        if field == "data" and data != "[DONE]":
            yield json.loads(data)
