# SPDX-License-Identifier: Apache-2.0
"""Bodies of the two legs."""

from typing import Any

import pytest

from pd_router.config import SideChannel
from pd_router.rewrite import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    needs_local_prefill,
    prefill_body,
    prefill_params,
    pull_decode_params,
    push_decode_params,
    with_params,
)

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_prefill_computes_one_token_and_answers_whole() -> None:
    leg = prefill_body(
        {
            "prompt": "p",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 500,
            "max_completion_tokens": 600,
            "min_tokens": 400,
            "n": 4,
            "best_of": 8,
            "temperature": 0.5,
            "seed": 7,
        }
    )
    assert leg == {
        "prompt": "p",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 7,
    }


def test_max_completion_tokens_is_not_made_up() -> None:
    assert "max_completion_tokens" not in prefill_body({"prompt": "p"})
    leg = prefill_body({"messages": [], "max_completion_tokens": None})
    assert leg["max_completion_tokens"] is None
    assert leg["max_tokens"] == 1


@pytest.mark.parametrize(
    "field",
    [
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "structured_outputs",
        "echo",
    ],
)
def test_what_shapes_only_the_answer_is_dropped(field: str) -> None:
    assert field not in prefill_body({"prompt": "p", field: 1})


@pytest.mark.parametrize(
    "field",
    [
        "messages",
        "tools",
        "response_format",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "suffix",
        "cache_salt",
        "mm_processor_kwargs",
        "priority",
        "model",
    ],
)
def test_what_shapes_the_prompt_or_its_hash_stays(field: str) -> None:
    assert prefill_body({field: ["as it is"]})[field] == ["as it is"]


@pytest.mark.parametrize(
    "forced", ["required", {"type": "function", "function": {"name": "f"}}]
)
def test_a_forced_tool_choice_becomes_null_and_the_tools_stay(forced: Any) -> None:
    body = {"messages": [], "tools": TOOLS, "tool_choice": forced}
    leg = prefill_body(body)
    assert leg["tool_choice"] is None
    assert leg["tools"] == TOOLS
    assert prefill_body(body, keep_tool_choice=True)["tool_choice"] == forced


@pytest.mark.parametrize("free", ["none", "auto"])
def test_other_tool_choices_stay(free: str) -> None:
    body = {"messages": [], "tools": TOOLS, "tool_choice": free}
    assert prefill_body(body)["tool_choice"] == free
    assert "tool_choice" not in prefill_body({"messages": [], "tools": TOOLS})


def test_the_clients_body_is_not_touched() -> None:
    body = {"prompt": "p", "stream": True, "n": 2, "stop": ["x"]}
    before = dict(body)
    prefill_body(body)
    leg = with_params(body, {"transfer_id": "t"})
    assert body == before
    assert leg == {**before, "kv_transfer_params": {"transfer_id": "t"}}


@pytest.mark.parametrize(
    ("n", "told"), [({}, 1), ({"n": 3}, 3), ({"n": None}, 1), ({"n": "x"}, 1)]
)
def test_prefill_is_told_how_many_will_read(n: dict[str, Any], told: int) -> None:
    assert prefill_params("t", n) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "t",
        "num_receivers": told,
    }


def test_push_tells_decode_where_prefill_is() -> None:
    assert push_decode_params("t", SideChannel("h", 5601, None, 2, 4)) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_engine_id": None,
        "remote_host": "h",
        "remote_port": 5601,
        "tp_size": 2,
        "pp_size": 4,
    }


def test_pull_relays_what_prefill_answered() -> None:
    answered = {"remote_block_ids": [[1]], "transfer_id": "old", "extra": 5}
    assert pull_decode_params("t", {"n": 2}, answered) == {
        "remote_block_ids": [[1]],
        "extra": 5,
        "transfer_id": "t",
        "num_receivers": 2,
    }


@pytest.mark.parametrize(
    ("path", "body", "local"),
    [
        (COMPLETIONS_PATH, {"prompt": "p", "logprobs": 1}, False),
        (COMPLETIONS_PATH, {"prompt": "p", "echo": True}, False),
        (COMPLETIONS_PATH, {"prompt": "p", "echo": True, "logprobs": 0}, True),
        (COMPLETIONS_PATH, {"prompt": "p", "prompt_logprobs": 0}, True),
        (COMPLETIONS_PATH, {"prompt": "p", "use_beam_search": True}, True),
        (COMPLETIONS_PATH, {"prompt_embeds": "e"}, False),
        (COMPLETIONS_PATH, {"prompt_embeds": ["e"]}, False),
        (COMPLETIONS_PATH, {"prompt_embeds": ["e", "f"]}, True),
        (COMPLETIONS_PATH, {"prompt_embeds": "e", "prompt": "p"}, True),
        (CHAT_PATH, {"messages": [], "logprobs": True, "top_logprobs": 2}, False),
        (CHAT_PATH, {"messages": [], "echo": True}, True),
        (CHAT_PATH, {"messages": [], "prompt_logprobs": 1}, True),
    ],
)
def test_what_a_handoff_cannot_serve_stays_on_decode(
    path: str, body: dict[str, Any], local: bool
) -> None:
    assert needs_local_prefill(path, body) is local
