# SPDX-License-Identifier: Apache-2.0
"""The compiled planner does what the numpy version does."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.planning import UNTOLD, same_pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import (
    Native,
    Table,
    load,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import Pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import PlanError, plan
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

PAGE = 64
Tables = tuple[list[BlockArray], list[BlockArray]]


def compiled() -> Native:
    native = load({})
    if native is None:
        pytest.skip("the native planner is not built here")
    return native


def outcome(
    native: Native | None, pages: Pages, tables: Tables, max_bytes: int
) -> object:
    """All that can be seen of a plan, or of its failure."""
    try:
        pieces = plan(pages, UNTOLD, *tables, max_bytes, native)
    except PlanError as error:
        return str(error)
    return [
        (
            piece.local.tolist(),
            piece.remote.tolist(),
            piece.local.dtype,
            piece.remote.dtype,
            piece.bytes,
            piece.descriptors,
        )
        for piece in pieces
    ]


def _ids(count: int, length: int) -> st.SearchStrategy[list[int]]:
    def scattered(seed: int) -> list[int]:
        chosen = np.random.default_rng(seed).integers(0, count, length)
        return [int(block) for block in chosen]

    upwards = st.integers(0, max(0, count - length)).map(
        lambda start: list(range(start, start + length))
    )
    return st.one_of(
        upwards,
        upwards.map(lambda ids: ids[::-1]),
        st.integers(0, 99).map(scattered),
        # Ids that a side lacks, and the same one twice, are among these.
        st.lists(st.integers(-1, count), min_size=length, max_size=length),
    )


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Pages, Tables, int]:
    group_of_region = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    # Ids of one, two and three bytes.
    here = draw(st.sampled_from([1, 9, 250, 3_000, 5_000_000]))
    there = draw(st.integers(1, 300))
    regions = [
        RegionInfo(f"l{i}", g, i << 40, PAGE * (1 + i % 2), 2 * PAGE, here, 0)
        for i, g in enumerate(group_of_region)
    ]
    (pages,) = same_pages(regions, there).parts
    tables: Tables = ([], [])
    tables_count = max(group_of_region) + 1 + draw(st.sampled_from([0] * 9 + [1]))
    for _ in range(tables_count):
        length = draw(st.one_of(st.integers(0, 5), st.integers(40, 120)))
        other = length + draw(st.sampled_from([0] * 19 + [1]))
        for side, (count, size) in enumerate(((here, length), (there, other))):
            ids = draw(_ids(count, size))
            tables[side].append(np.array(ids, dtype=np.int32))
    return pages, tables, draw(st.integers(0, 60 * PAGE))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(_cases(), st.booleans())
def test_both_planners_agree(case: tuple[Pages, Tables, int], releases: bool) -> None:
    native = compiled()
    limit = 0 if releases else sys.maxsize
    native = replace(native, pairs=limit, indices=limit)
    assert outcome(native, *case) == outcome(None, *case)


@pytest.mark.parametrize("step", [1, 2, -1])
def test_slices_that_are_not_contiguous_are_read_as_they_are(step: int) -> None:
    (pages,) = same_pages([RegionInfo("l", 0, 0, PAGE, PAGE, 64, 0)], 64).parts
    shuffled = np.random.default_rng(3).permutation(64).astype(np.int32)
    tables: Tables = ([shuffled[::step]], [shuffled[::-1][::step]])
    results = [outcome(n, pages, tables, 5 * PAGE) for n in (compiled(), None)]
    assert results[0] == results[1]


def test_ids_of_another_width_are_not_misread() -> None:
    (pages,) = same_pages([RegionInfo("l", 0, 0, PAGE, PAGE, 64, 0)], 64).parts
    wide = [np.arange(4, dtype=np.int64)]
    with pytest.raises(ValueError, match="do not agree"):
        plan(pages, UNTOLD, wide, wide, PAGE, compiled())  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [0, 5, 7])
def test_room_of_another_size_is_refused(room: int) -> None:
    ids, regions = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
    out = np.full(room, -1, dtype=np.int32)
    with pytest.raises(ValueError, match="blocks times regions"):
        compiled().compiled.expand(ids, regions, 10, out, 0)
    assert (out == -1).all()


def test_outputs_that_cannot_be_written_are_refused() -> None:
    ids = np.arange(3, dtype=np.int32)
    fixed = np.empty(3, dtype=np.int32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        compiled().compiled.expand(ids, np.zeros(1, np.int32), 10, fixed, 0)


# Everything but the call itself is made before, since numpy releases the GIL too.
def _pairing(native: Native) -> Callable[[], object]:
    count = 1_000_000
    ids = np.random.default_rng(5).permutation(count).astype(np.int32)
    room, other = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    tables: list[Table] = [(ids, ids, count, room, other, np.empty(1, np.int32))]
    return lambda: native.compiled.pair_tables(tables, count, count, native.pairs)


def _expanding(native: Native) -> Callable[[], object]:
    ids, regions = np.arange(1_000_000, dtype=np.int32), np.arange(8, dtype=np.int32)
    out = np.empty(len(ids) * len(regions), dtype=np.int32)
    expand, limit = native.compiled.expand, native.indices
    return lambda: expand(ids, regions, len(ids), out, limit)


def _digesting(native: Native) -> Callable[[], object]:
    tokens = [7] * 200_000
    digest, limit = native.compiled.token_digests, native.tokens
    return lambda: digest(tokens, len(tokens), 16, limit)


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("prepare", [_pairing, _expanding, _digesting])
def test_the_gil_is_free_during_long_work_only(
    prepare: Callable[[Native], Callable[[], object]], releases: bool
) -> None:
    limit = 0 if releases else sys.maxsize
    call = prepare(replace(compiled(), pairs=limit, indices=limit, tokens=limit))
    state = "before"
    ended = threading.Event()

    def work() -> None:
        nonlocal state
        until = time.monotonic() + (20 if releases else 0.5)
        while not ended.is_set() and time.monotonic() < until:
            state = "inside"
            call()
            state = "after"
        ended.set()

    # No thread is made to give the GIL up: what is seen of the other one is what it
    # shows when it does so by itself.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    seen = set()
    thread = threading.Thread(target=work)
    try:
        thread.start()
        until = time.monotonic() + 30
        while not ended.is_set() and time.monotonic() < until:
            seen.add(state)
            if "inside" in seen:
                ended.set()
            time.sleep(0.0002)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join(30)
    assert ("inside" in seen) == releases
