# SPDX-License-Identifier: Apache-2.0
"""Server-sent events as bytes: framing, and just enough reading of them."""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .rewrite import KV_PARAMS

MAX_EVENT_BYTES = 32 * 1024 * 1024
DONE_EVENT = b"data: [DONE]\n\n"

# A line end is taken whole: a CRLF must not pass for two line ends.
_LINE_END = rb"(?>\r\n|\n|\r)"
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
_LINES = re.compile(_LINE_END)


class EventTooLargeError(Exception):
    """A single event exceeds what the router is willing to hold."""


class Framer:
    """Cuts a byte stream into whole events; joined, they are the stream again."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes and give out the events that they complete.

        Raises:
            EventTooLargeError: the unfinished event is over ``MAX_EVENT_BYTES``.
        """
        self._buffer += data
        events = []
        start = 0
        for match in _BLANK_LINE.finditer(self._buffer, self._scanned):
            events.append(bytes(self._buffer[start : match.end()]))
            start = match.end()
        del self._buffer[:start]
        # The blank line may straddle two reads: at most three bytes of it.
        self._scanned = max(0, len(self._buffer) - 3)
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLargeError(
                f"an event of more than {MAX_EVENT_BYTES} bytes has no end"
            )
        return events

    def rest(self) -> bytes:
        """The bytes of the event that has not ended."""
        return bytes(self._buffer)


class Kind(Enum):
    """What an event means for the router."""

    IGNORED = auto()
    """No data: a comment, a bare blank line."""
    PREAMBLE = auto()
    """A chat chunk that says who speaks and nothing else."""
    CONTENT = auto()
    ERROR = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """An event's meaning and, where it was read, its JSON value."""

    kind: Kind
    value: Any = None


def event_data(block: bytes) -> bytes | None:
    """The data of one event, or ``None`` if it carries none."""
    lines = []
    for line in _LINES.split(block):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None


def classify(block: bytes) -> Event:
    """Read one event."""
    data = event_data(block)
    if data is None:
        return Event(Kind.IGNORED)
    if data.strip() == b"[DONE]":
        return Event(Kind.DONE)
    try:
        value = json.loads(data)
    except ValueError:
        return Event(Kind.CONTENT)
    if isinstance(value, dict):
        if value.get("error"):
            return Event(Kind.ERROR, value)
        if _is_preamble(value):
            return Event(Kind.PREAMBLE, value)
    return Event(Kind.CONTENT, value)


def may_need_reading(block: bytes) -> bool:
    """Cheap test for events that a running stream must not pass on unread."""
    return (
        b'"error"' in block or b"[DONE]" in block or f'"{KV_PARAMS}"'.encode() in block
    )


def encode(value: Any) -> bytes:
    """One event with a JSON value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


def without_params(block: bytes, event: Event) -> bytes:
    """The event without hand-off parameters; the same bytes if it has none."""
    if isinstance(event.value, dict) and KV_PARAMS in event.value:
        kept = {k: v for k, v in event.value.items() if k != KV_PARAMS}
        return encode(kept)
    return block


def strip_params(body: bytes) -> bytes:
    """A whole JSON answer without hand-off parameters."""
    if KV_PARAMS.encode() not in body:
        return body
    try:
        value = json.loads(body)
    except ValueError:
        return body
    if not isinstance(value, dict) or KV_PARAMS not in value:
        return body
    del value[KV_PARAMS]
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _is_preamble(value: dict[str, Any]) -> bool:
    # The engine announces the role before it looks at whether the request
    # failed, so this chunk does not prove that there is an answer.
    choices = value.get("choices")
    if value.get("object") != "chat.completion.chunk" or not isinstance(choices, list):
        return False
    return bool(choices) and all(_only_announces_role(choice) for choice in choices)


def _only_announces_role(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict) or not delta.get("role"):
        return False
    return not any(value for key, value in delta.items() if key != "role")
