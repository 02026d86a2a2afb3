# SPDX-License-Identifier: Apache-2.0
"""Digests of token ids, compiled and by hashlib."""

import hashlib
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.digests import (
    token_digest,
    token_digests,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import Native, load


def compiled() -> Native:
    native = load({})
    if native is None:
        pytest.skip("the native planner is not built here")
    return native


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70),
        # Around the hash's own block of 16 tokens.
        st.sampled_from([15, 16, 17, 31, 32, 33, 48, 4096]).map(lambda n: [n] * n),
    ),
    st.integers(1, 40),
    st.integers(1, 64),
    st.booleans(),
)
def test_both_give_the_same_bytes(
    tokens: list[int], block: int, size: int, releases: bool
) -> None:
    native = replace(compiled(), tokens=0 if releases else sys.maxsize)
    expected = b"".join(
        hashlib.blake2b(
            struct.pack(f"={end}q", *tokens[:end]), digest_size=size
        ).digest()
        for end in range(block, len(tokens) + 1, block)
    )
    for implementation in (native, None):
        assert token_digests(tokens, block, size, implementation) == expected
        whole = token_digest(tokens, size, implementation)
        assert whole == token_digests(tokens, len(tokens) or 1, size, None)


@pytest.mark.parametrize("tokens", [(1, 2, 3), range(3)])
def test_other_sequences_are_digested_too(tokens: Sequence[int]) -> None:
    assert token_digest(tokens, 16, compiled()) == token_digest(list(tokens), 16, None)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, 2**63], OverflowError),
        ([1, -(2**63) - 1], OverflowError),
        ([1, "2"], TypeError),
        ([1.5, 2], TypeError),
        ([None], TypeError),
    ],
)
def test_what_is_no_token_is_refused_by_both(
    tokens: list[int], error: type[Exception]
) -> None:
    for implementation in (compiled(), None):
        with pytest.raises(error):
            token_digest(tokens, 16, implementation)


def test_a_list_that_shrinks_while_it_is_read_is_refused() -> None:
    tokens: list[int] = []

    class Emptying:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens += [1, Emptying(), 3]  # type: ignore[list-item]
    with pytest.raises(IndexError):
        token_digest(tokens, 16, compiled())


@pytest.mark.parametrize(("block", "size"), [(0, 16), (-1, 16), (4, 0), (4, 65)])
def test_sizes_that_make_no_sense_are_refused(block: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        token_digests([1, 2, 3, 4], block, size, compiled())
