# SPDX-License-Identifier: Apache-2.0
"""Pairing of block tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.planning import UNTOLD, same_pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import Pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import (
    Piece,
    PlanError,
    plan,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

HERE, THERE = 20, 30
PAGE = 64


def _pages(*groups: int) -> Pages:
    regions = [
        RegionInfo(f"l{i}", g, i << 20, PAGE, PAGE, HERE, 0)
        for i, g in enumerate(groups)
    ]
    (pages,) = same_pages(regions, THERE).parts
    return pages


def _blocks(*ids: int) -> tuple[BlockArray, ...]:
    return (np.array(ids, dtype=np.int32),)


def _pairs(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [
        (int(mine), int(theirs))
        for piece in pieces
        for mine, theirs in zip(piece.local, piece.remote, strict=True)
    ]


def test_all_regions_of_a_block_are_paired() -> None:
    (piece,) = plan(_pages(0, 0), UNTOLD, _blocks(3, 4), _blocks(8, 9), 10**9)
    assert _pairs([piece]) == [(3, 8), (4, 9), (23, 38), (24, 39)]
    assert (piece.bytes, piece.descriptors) == (4 * PAGE, 2)
    assert piece.local.dtype == piece.remote.dtype == np.int32


def test_tables_that_run_downwards_merge() -> None:
    (piece,) = plan(_pages(0), UNTOLD, _blocks(6, 5, 4), _blocks(9, 8, 7), 10**9)
    assert _pairs([piece]) == [(4, 7), (5, 8), (6, 9)]
    assert piece.descriptors == 1


def test_neighbours_on_one_side_only_do_not_merge() -> None:
    (piece,) = plan(_pages(0), UNTOLD, _blocks(1, 2, 3), _blocks(5, 7, 8), 10**9)
    assert piece.descriptors == 2


def test_pieces_are_bounded_but_hold_a_block() -> None:
    pieces = plan(_pages(0, 0), UNTOLD, _blocks(1, 2, 3), _blocks(4, 5, 6), 4 * PAGE)
    assert [piece.bytes for piece in pieces] == [4 * PAGE, 2 * PAGE]
    pieces = plan(_pages(0, 0), UNTOLD, _blocks(1, 2, 3), _blocks(4, 5, 6), 1)
    assert [piece.bytes for piece in pieces] == [2 * PAGE] * 3


def test_a_group_without_regions_has_nothing_to_move() -> None:
    pieces = plan(
        _pages(1), UNTOLD, (*_blocks(1), *_blocks(2)), (*_blocks(3), *_blocks(4)), 999
    )
    assert _pairs(pieces) == [(2, 4)]


def test_groups_have_their_own_tables() -> None:
    pieces = plan(
        _pages(0, 1),
        UNTOLD,
        (*_blocks(1), *_blocks(2)),
        (*_blocks(3), *_blocks(4)),
        999,
    )
    assert _pairs(pieces) == [(1, 3), (22, 34)]


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (_blocks(1, 2), _blocks(1), "2 local blocks for 1"),
        (_blocks(HERE), _blocks(1), f"local block ids reach from {HERE}"),
        (_blocks(1), _blocks(THERE), "remote block ids"),
        (_blocks(-1), _blocks(1), "local block ids reach from -1"),
        (_blocks(1), _blocks(1, -5), "1 local blocks for 2"),
        (_blocks(1), (), "0 remote groups"),
        ((*_blocks(1), *_blocks(1)), _blocks(1), "2 local"),
    ],
)
def test_what_cannot_be_paired_is_named(
    mine: tuple[BlockArray, ...], theirs: tuple[BlockArray, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan(_pages(0), UNTOLD, mine, theirs, 10**9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(0, HERE).flatmap(
        lambda n: st.tuples(
            st.permutations(range(HERE)).map(lambda p: p[:n]),
            st.permutations(range(THERE)).map(lambda p: p[:n]),
        )
    ),
    st.integers(1, 10 * PAGE),
)
def test_every_pair_is_moved_once(
    layers: int, tables: tuple[list[int], list[int]], max_bytes: int
) -> None:
    mine, theirs = tables
    pieces = plan(
        _pages(*[0] * layers), UNTOLD, _blocks(*mine), _blocks(*theirs), max_bytes
    )
    assert sorted(_pairs(pieces)) == sorted(
        (layer * HERE + a, layer * THERE + b)
        for layer in range(layers)
        for a, b in zip(mine, theirs, strict=True)
    )
    assert sum(piece.bytes for piece in pieces) == layers * len(mine) * PAGE
    for piece in pieces:
        joined = (np.diff(piece.local) == 1) & (np.diff(piece.remote) == 1)
        assert len(piece.local) - np.count_nonzero(joined) <= piece.descriptors
        assert piece.bytes <= max(max_bytes, layers * PAGE)


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [(0, 1, range(1)), (0, 16, range(1)), (16, 17, range(1, 3)), (32, 1, range(2, 3))],
)
def test_the_blocks_of_tokens(first: int, count: int, expected: range) -> None:
    assert Want(100, first, count, b"").block_range(16) == expected
