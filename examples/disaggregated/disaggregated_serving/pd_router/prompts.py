# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts: one request per prompt, answers merged in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from .rewrite import KV_PARAMS, Body, receivers
from .sse import Event, encode


def split(body: Mapping[str, Any]) -> list[Body]:
    """One body per prompt; a single body, unchanged, where there is one prompt.

    What is neither a list of strings nor of token lists is left to the engine to
    judge.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2:
        return [dict(body)]
    if not all(isinstance(item, (str, list)) for item in prompt):
        return [dict(body)]
    return [{**body, "prompt": item} for item in prompt]


class Merger:
    """Puts the answers to the parts of one request together.

    ``id`` and ``created`` are the first part's for all, so that the client sees
    one answer.
    """

    def __init__(self, body: Mapping[str, Any], answer_id: str) -> None:
        self._per_prompt = receivers(body)
        self._id = answer_id
        self._created: Any = None
        self._usage: dict[str, Any] = {}
        self._usage_chunk: Body | None = None

    def whole(self, parts: Sequence[Mapping[str, Any]]) -> Body:
        """One answer from the whole answers to all parts, in prompt order."""
        merged = self._owned(parts[0])
        merged["choices"] = [
            {**choice, "index": self._index(part, choice)}
            for part, answer in enumerate(parts)
            for choice in sorted(answer["choices"], key=lambda c: c["index"])
        ]
        usage: dict[str, Any] = {}
        for answer in parts:
            if isinstance(answer.get("usage"), dict):
                _add(usage, answer["usage"])
        merged["usage"] = usage
        # Timings of one part say nothing about the whole.
        merged.pop("metrics", None)
        return merged

    def chunk(self, part: int, event: Event) -> bytes | None:
        """One part's stream event for the merged stream; ``None`` to hold it."""
        value = event.value
        if not isinstance(value, dict):
            return None
        choices = value.get("choices")
        if not choices:
            if isinstance(value.get("usage"), dict):
                _add(self._usage, value["usage"])
                self._usage_chunk = self._owned(value)
            return None
        owned = self._owned(value)
        owned["choices"] = [
            {**choice, "index": self._index(part, choice)} for choice in choices
        ]
        return encode(owned)

    def final_usage(self) -> bytes | None:
        """The summed usage chunk, if the parts sent any."""
        if self._usage_chunk is None:
            return None
        chunk = {**self._usage_chunk, "usage": self._usage}
        chunk.pop("metrics", None)
        return encode(chunk)

    def _index(self, part: int, choice: Mapping[str, Any]) -> int:
        index = choice["index"]
        if not isinstance(index, int):
            raise TypeError(f"a choice has the index {index!r}")
        return part * self._per_prompt + index

    def _owned(self, value: Mapping[str, Any]) -> Body:
        if self._created is None:
            self._created = value.get("created")
        owned = {k: v for k, v in value.items() if k != KV_PARAMS}
        owned["id"] = self._id
        if self._created is not None:
            owned["created"] = self._created
        return owned


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            nested = total.get(key)
            if not isinstance(nested, dict):
                nested = total[key] = {}
            _add(nested, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[key] = (total.get(key) or 0) + value
        else:
            total.setdefault(key, value)
