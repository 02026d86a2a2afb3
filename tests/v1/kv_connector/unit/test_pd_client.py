# SPDX-License-Identifier: Apache-2.0
"""The demo's client against a real server that answers as it is told."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pd_client import Ask, RequestError, send
from pd_processes import free_ports

USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


class Script(http.server.ThreadingHTTPServer):
    """Sends ``pieces``, ``pause`` seconds apart, and keeps the request."""

    status = 200
    pieces: tuple[str, ...] = ()
    pause = 0.0
    path = ""
    body: dict[str, Any]

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(http.server.BaseHTTPRequestHandler):
    server: Script

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.body = json.loads(self.rfile.read(length))
        self.server.path = self.path
        self.send_response(self.server.status)
        self.end_headers()
        for piece in self.server.pieces:
            self.wfile.write(piece.encode())
            self.wfile.flush()
            time.sleep(self.server.pause)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def event(**content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def chat(text: str, finish: str | None = None) -> dict[str, object]:
    return {"delta": {"content": text}, "finish_reason": finish}


def test_a_streamed_chat_is_put_together_and_timed(script: Script) -> None:
    script.pause = 0.05
    script.pieces = (
        ": comment\n\n",
        event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
        event(choices=[chat("one ")]),
        event(choices=[chat("two ")]),
        event(choices=[chat("three", "length")]),
        event(choices=[], usage=USAGE),
        "data: [DONE]\n\n",
    )
    ask = Ask("t", "hello", max_tokens=3, chat=True)
    answer = send("127.0.0.1", script.port, "m", ask, 30)

    assert (answer.text, answer.finish_reason) == ("one two three", "length")
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 3)
    assert answer.ttft is not None
    assert answer.tpot is not None
    assert 0.1 <= answer.ttft < answer.total
    assert answer.ttft + 2 * answer.tpot < answer.total
    assert script.path == "/v1/chat/completions"
    assert script.body["messages"] == [{"role": "user", "content": "hello"}]
    assert script.body["temperature"] == 0


def test_a_whole_completion_has_no_time_to_first_token(script: Script) -> None:
    choice = {"text": " Paris", "finish_reason": "stop"}
    script.pieces = (json.dumps({"choices": [choice], "usage": USAGE}),)
    ask = Ask("t", "hello", max_tokens=3, stream=False)
    answer = send("127.0.0.1", script.port, "m", ask, 30)

    assert (answer.text, answer.ttft, answer.tpot) == (" Paris", None, None)
    assert script.path == "/v1/completions"
    assert script.body["prompt"] == "hello"


ENDED = event(choices=[chat("a", "stop")])


@pytest.mark.parametrize(
    ("status", "pieces", "words"),
    [
        (503, ('{"error": "transfer 12ab failed"}',), "answered 503.*12ab"),
        (200, (event(choices=[chat("a")]), event(error="lost")), "error: lost"),
        (200, (event(choices=[chat("a")]), event(usage=USAGE)), "ended early"),
        (200, (ENDED,), "ended early"),
        (200, (event(usage=USAGE),), "ended early"),
        (200, ("data: {half",), "failed after"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(
    script: Script, status: int, pieces: tuple[str, ...], words: str
) -> None:
    script.status, script.pieces = status, pieces
    with pytest.raises(RequestError, match=words):
        send("127.0.0.1", script.port, "m", Ask("t", "x", 3, chat=True), 30)


def test_a_silent_server_is_given_up(script: Script) -> None:
    script.pieces, script.pause = (event(choices=[chat("a")]), ENDED), 1.5
    with pytest.raises(RequestError, match=r"failed after|did not end within"):
        send("127.0.0.1", script.port, "m", Ask("t", "x", 3, chat=True), 0.5)


def test_a_refused_connection_is_an_error() -> None:
    (port,) = free_ports(1)
    with pytest.raises(RequestError, match="Connection refused"):
        send("127.0.0.1", port, "m", Ask("t", "x", 3), 5)
