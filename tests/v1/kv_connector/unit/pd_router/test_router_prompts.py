# SPDX-License-Identifier: Apache-2.0
"""Splitting of prompt lists and merging of the answers."""

import json
from typing import Any

import pytest

from pd_router.prompts import Merger, split
from pd_router.sse import classify, event_data
from router_backends import completion, event, token


@pytest.mark.parametrize(
    "prompt", ["text", [1, 2, 3], ["only"], [[1, 2]], [], None, ["a", 1], [{}, {}]]
)
def test_what_is_one_prompt_or_none_goes_on_as_it_is(prompt: Any) -> None:
    body = {"prompt": prompt, "n": 2}
    assert split(body) == [body]


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[1, 2], [3]]])
def test_lists_are_split_in_order(prompt: list[Any]) -> None:
    parts = split({"prompt": prompt, "n": 2})
    assert [part["prompt"] for part in parts] == prompt
    assert all(part["n"] == 2 for part in parts)


def test_whole_answers_are_merged_by_prompt_and_choice() -> None:
    merger = Merger({"n": 2}, "cmpl-r")
    first = completion("a", "b", usage=(3, 4))
    second = completion("c", "d", usage=(5, 6))
    first["choices"].reverse()
    first["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}
    second["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
    second["kv_transfer_params"] = first["kv_transfer_params"] = {"secret": 1}
    first["metrics"] = {"ttft": 1}
    second["created"] = 99
    merged = merger.whole([first, second])
    assert [(c["index"], c["text"]) for c in merged["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    assert merged["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 10,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (merged["id"], merged["created"]) == ("cmpl-r", 17)
    assert "kv_transfer_params" not in merged
    assert "metrics" not in merged


def test_stream_events_get_their_place() -> None:
    merger = Merger({"n": 3}, "cmpl-r")
    data = merger.chunk(2, classify(token("x", index=1)))
    assert data is not None
    value = json.loads(event_data(data) or b"")
    assert value["choices"][0]["index"] == 7
    assert (value["id"], value["created"]) == ("cmpl-r", 17)


def test_usage_events_are_held_and_summed() -> None:
    merger = Merger({}, "cmpl-r")
    assert merger.final_usage() is None
    for tokens in (3, 4):
        chunk = {**completion(usage=(tokens, 1)), "choices": []}
        assert merger.chunk(0, classify(event(chunk))) is None
    data = merger.final_usage()
    assert data is not None
    value = json.loads(event_data(data) or b"")
    assert value["choices"] == []
    assert value["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
    }
