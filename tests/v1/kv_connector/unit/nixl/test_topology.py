# SPDX-License-Identifier: Apache-2.0
"""Which ranks serve which, for every pair of tensor-parallel sizes."""

from itertools import product

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.topology import (
    RankShape,
    TopologyError,
    heads_of,
    idle,
    readers,
    slices,
    sources,
)

SIZES = (1, 2, 3, 4, 8, 16)
HEADS = (1, 2, 4, 8, 12, 48)


def _fits(heads: int, *tp_sizes: int) -> bool:
    return all(heads % tp == 0 or tp % heads == 0 for tp in tp_sizes)


CASES = [case for case in product(SIZES, SIZES, HEADS) if _fits(case[2], *case[:2])]


@pytest.mark.parametrize(("local_tp", "remote_tp", "heads"), CASES)
def test_each_head_comes_once_from_a_rank_that_holds_it(
    local_tp: int, remote_tp: int, heads: int
) -> None:
    for rank in range(local_tp):
        given = slices(RankShape(rank, local_tp), remote_tp, heads)
        got = [head for part in given.values() for head in part]
        assert sorted(got) == list(heads_of(rank, local_tp, heads))
        for source, part in given.items():
            held = heads_of(source, remote_tp, heads)
            assert held.start <= part.start < part.stop <= held.stop


@pytest.mark.parametrize(("local_tp", "remote_tp", "heads"), CASES)
def test_readers_and_idle_ranks_are_the_other_view_of_sources(
    local_tp: int, remote_tp: int, heads: int
) -> None:
    asked: dict[int, set[int]] = {rank: set() for rank in range(remote_tp)}
    for rank in range(local_tp):
        for source in sources(RankShape(rank, local_tp), remote_tp, [heads]):
            asked[source].add(rank)
    for source, ranks in asked.items():
        seen = readers(RankShape(source, remote_tp), local_tp, [heads])
        assert set(seen) == ranks
    none = tuple(source for source, ranks in asked.items() if not ranks)
    assert idle(local_tp, remote_tp, [heads]) == none


@pytest.mark.parametrize("heads", HEADS)
def test_equal_sizes_pair_rank_by_rank(heads: int) -> None:
    for tp in SIZES:
        if _fits(heads, tp):
            for rank in range(tp):
                assert sources(RankShape(rank, tp), tp, [heads, 1]) == (rank,)


def test_copies_share_the_work() -> None:
    # One latent on two ranks, for four: each of the two serves two.
    assert [sources(RankShape(r, 4), 2, [1]) for r in range(4)] == [
        (0,),
        (0,),
        (1,),
        (1,),
    ]
    assert [sources(RankShape(r, 2), 4, [1]) for r in range(2)] == [(0,), (2,)]
    assert idle(2, 4, [1]) == (1, 3)


@pytest.mark.parametrize(("tp", "heads"), [(3, 8), (8, 12), (2, 0)])
def test_what_does_not_divide_is_refused(tp: int, heads: int) -> None:
    with pytest.raises(TopologyError, match="one must be a multiple"):
        heads_of(0, tp, heads)
