# SPDX-License-Identifier: Apache-2.0
"""How long a prompt is and how it begins, without a tokenizer.

A prompt is looked at as a string of bytes with four bytes to a token: its UTF-8 text,
or four bytes for each token id that the client gives. So ids are counted exactly and
text is estimated; equal beginnings give equal bytes either way.
"""

import functools
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from .rewrite import receivers

BYTES_PER_TOKEN = 4
CHUNK_TOKENS = 64
"""Beginnings are compared in chunks of so many tokens."""
MEDIA_TOKENS = 256
"""What an image or another part that is no text counts."""
ANSWER_TOKENS = 512
"""What an answer counts at most, since most end before their ``max_tokens``."""

_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN
_DIGEST_BYTES = 16
_MAX_ID = 2**32


class PromptSize:
    """Estimates for the prompt of one request body; each is made when it is asked."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of the prompt, at least 1."""
        return max(1, -(-len(self._bytes) // BYTES_PER_TOKEN))

    @functools.cached_property
    def answer_tokens(self) -> int:
        """Tokens that all answers to it may have, as far as load is concerned."""
        asked = _count(self._body.get("max_completion_tokens")) or _count(
            self._body.get("max_tokens")
        )
        return min(asked or ANSWER_TOKENS, ANSWER_TOKENS) * receivers(self._body)

    @functools.cached_property
    def chunks(self) -> tuple[bytes, ...]:
        """A name for each beginning of the prompt that is so many whole chunks long.

        Prompts of different models or cache salts have nothing in common.
        """
        scope = [self._body.get("model"), self._body.get("cache_salt")]
        name = hashlib.blake2b(
            json.dumps(scope, default=str).encode(), digest_size=_DIGEST_BYTES
        ).digest()
        names = []
        data = self._bytes
        for end in range(_CHUNK_BYTES, len(data) + 1, _CHUNK_BYTES):
            chunk = data[end - _CHUNK_BYTES : end]
            name = hashlib.blake2b(name + chunk, digest_size=_DIGEST_BYTES).digest()
            names.append(name)
        return tuple(names)

    @functools.cached_property
    def _bytes(self) -> bytes:
        body = self._body
        if "messages" not in body:
            return _of_prompt(body.get("prompt")) + _of_media(body.get("prompt_embeds"))
        # Templates show tools before what is said.
        pieces = [_text(body["tools"])] if body.get("tools") else []
        messages = body["messages"]
        for message in messages if isinstance(messages, list) else [messages]:
            pieces += _of_message(message)
        return b"".join(pieces)


def _of_prompt(prompt: object) -> bytes:
    if isinstance(prompt, str):
        return _text(prompt)
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            return _of_prompt(prompt[0])
        if all(type(item) is int and 0 <= item < _MAX_ID for item in prompt):
            return array("I", prompt).tobytes()
    return b"" if prompt is None else _text(prompt)


def _of_message(message: object) -> Iterator[bytes]:
    if not isinstance(message, dict):
        yield _text(message)
        return
    yield _text(message.get("role"))
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield _text(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            yield _text(part["text"])
        else:
            yield _of_media(part)
    if message.get("tool_calls"):
        yield _text(message["tool_calls"])


def _of_media(value: object) -> bytes:
    """As many bytes as it counts, which are others for another image."""
    if value is None:
        return b""
    digest = hashlib.blake2b(_text(value), digest_size=_DIGEST_BYTES).digest()
    return digest * (MEDIA_TOKENS * BYTES_PER_TOKEN // _DIGEST_BYTES)


def _text(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 1 else None
