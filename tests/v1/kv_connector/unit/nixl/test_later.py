# SPDX-License-Identifier: Apache-2.0
"""Values that are computed by whoever asks first."""

import pickle

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.later import Later
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.prompt import (
    later_digest,
    prompt_digest,
)


def test_a_value_is_computed_when_it_is_asked_for_and_once() -> None:
    calls: list[int] = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    later = Later(compute)
    assert calls == []
    assert [later.value, later.value] == [1, 1]
    assert calls == [1]


def test_it_reaches_another_process_as_a_value() -> None:
    tokens = list(range(100))
    later = later_digest(tokens)
    there = pickle.loads(pickle.dumps(later))
    assert there.value == later.value == prompt_digest(tokens)


def test_a_prompt_that_grows_afterwards_keeps_its_digest() -> None:
    tokens = [1, 2, 3]
    later = later_digest(tokens)
    tokens.append(4)
    assert later.value == prompt_digest([1, 2, 3])


def test_a_prompt_without_tokens_has_no_digest() -> None:
    assert later_digest(None).value == b""
    assert later_digest([]).value == b""


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, "1", None])
def test_what_is_no_token_has_no_digest(token: int) -> None:
    assert later_digest([1, token]).value == b""
