# SPDX-License-Identifier: Apache-2.0
"""Clients of the comparison: timed requests, and streams that only take up room."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from routing_loads import Occupied

REQUEST_TIMEOUT_S = 180.0
_JOIN_TIMEOUT_S = 30.0


class BenchError(RuntimeError):
    """The comparison cannot go on; the text says why."""


@contextlib.contextmanager
def _stream(
    port: int, prompt: Sequence[int], answer_tokens: int
) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun; it is cut off where it has not ended by itself.

    Raises:
        BenchError: it is refused.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BenchError(f"status {response.status}: {response.read(2000)!r}")
        yield response
    finally:
        connection.close()


def _tokens(response: http.client.HTTPResponse) -> Iterator[bool]:
    """True for each token as it comes, and False at last if the answer is whole.

    Raises:
        BenchError: there is an error in the stream.
    """
    for line in response:
        if line.startswith(b'data: {"error"'):
            raise BenchError(f"an error in the stream: {line!r}")
        if line.startswith(b"data: {"):
            yield True
        elif line.startswith(b"data: [DONE]"):
            yield False


def ask(port: int, prompt: Sequence[int], answer_tokens: int) -> tuple[float, float]:
    """Send one request; seconds to its first token and to its end.

    Raises:
        BenchError: it was not answered in full.
    """
    began = time.monotonic()
    first = None
    with _stream(port, prompt, answer_tokens) as response:
        for is_token in _tokens(response):
            if first is None and is_token:
                first = time.monotonic() - began
            if not is_token and first is not None:
                return first, time.monotonic() - began
    raise BenchError("the stream ended early")


class Background:
    """Streams that engines are sent past the router, to take up their room.

    Each phase has its own number of them at one engine, one answer after the other
    until the phase ends; what runs then is cut off.

    ``gaps`` has each time between two tokens of a stream, as its begin and its end.

    Args:
        ports: of the engines, by their numbers.
        streams: at the same time.
        answer_tokens: of each answer.
        prompt: gives a new one.
    """

    def __init__(
        self,
        ports: Sequence[int],
        streams: int,
        answer_tokens: int,
        prompt: Callable[[], Sequence[int]],
    ) -> None:
        self._ports = ports
        self._streams = streams
        self._answer_tokens = answer_tokens
        self._prompt = prompt
        self._failures: list[BaseException] = []
        self.gaps: list[tuple[float, float]] = []

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest of those that are at least in part between these moments.

        Raises:
            BenchError: there is none: no stream ran.
        """
        found = [
            until - since
            for since, until in list(self.gaps)
            if since < end and until > begin
        ]
        if not found:
            raise BenchError("no stream ran beside a request")
        return max(found)

    @contextlib.contextmanager
    def run(self, phases: Sequence[Occupied], began: float) -> Iterator[None]:
        """Occupy engines meanwhile; ``began`` is the load's beginning.

        Raises:
            BenchError: a stream failed, or does not end.
        """
        over = threading.Event()
        threads = [
            threading.Thread(target=self._occupy, args=(phase, began, over))
            for phase in phases
            for _ in range(self._streams)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(_JOIN_TIMEOUT_S)
        if any(thread.is_alive() for thread in threads):
            raise BenchError("a background stream does not end")
        if self._failures:
            raise BenchError(f"a background stream failed: {self._failures[0]}")

    def _occupy(self, phase: Occupied, began: float, over: threading.Event) -> None:
        ends = began + phase.ends
        if over.wait(max(0.0, began + phase.begins - time.monotonic())):
            return
        try:
            while time.monotonic() < ends and not over.is_set():
                port = self._ports[phase.engine]
                with _stream(port, self._prompt(), self._answer_tokens) as response:
                    last = None
                    for is_token in _tokens(response):
                        now = time.monotonic()
                        if now >= ends or over.is_set():
                            break
                        if is_token and last is not None:
                            self.gaps.append((last, now))
                        last = now
        except (BenchError, OSError, http.client.HTTPException) as error:
            self._failures.append(error)
