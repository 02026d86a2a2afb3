# SPDX-License-Identifier: Apache-2.0
"""READs of kept KV that fail: the prompt is computed, and nothing is lost."""

from collections.abc import Iterator

import pytest

from v1.kv_connector.unit.nixl.conversation import (
    HISTORY,
    NEXT,
    Cache,
    prompt,
)
from v1.kv_connector.unit.nixl.engine_side import BLOCK, BLOCKS
from v1.kv_connector.unit.nixl.reuse_side import (
    SHARED,
    SIZE,
    Keeper,
    Side,
    kept_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
)

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    Cache()
    kept = kept_of()
    keeper = Keeper(lambda: (kept,))
    yield keeper
    keeper.close()


@pytest.fixture
def side(keeper: Keeper) -> Iterator[Side]:
    side = Side(keeper.address)
    yield side
    side.close()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_read_that_fails_is_computed_here(side: Side, quiet: bool) -> None:
    registration_id = side.park().request.registration_id
    failed = ReceiveFailed(registration_id, FailureKind.LEASE, "let go", quiet)
    side.loads.failed(0, failed)
    assert side.loads.failing() == frozenset()
    assert side.completed() == {"p"}
    assert side.completed() == set()
    assert side.request.num_computed_tokens == 0
    held = -(-SHARED // BLOCK)
    assert side.pins.counts()["quiescing"] == (0 if quiet else held)
    assert side.cache.free() == BLOCKS - 1 - (0 if quiet else held)
    # Nothing of what may be half read is ever found in the cache.
    side.cache.resume(side.request)
    assert side.cache.cached(side.request)[1] == 0
    assert side.matched() == 0
    side.admit(0)
    assert side.orders == []
    assert side.request.num_computed_tokens == len(NEXT)
    if not quiet:
        taken = set(side.cache.table(side.request)[0])
        assert len(taken) == -(-len(NEXT) // BLOCK)
        side.loads.quiet(0, ReceiveQuiet(registration_id))
    side.end()
    assert side.over()
    assert side.last() == ("recomputed", 0, "let go")


def test_blocks_of_the_own_cache_survive_a_failed_read(keeper: Keeper) -> None:
    side = Side(keeper.address)
    before = prompt("before", HISTORY[: 3 * BLOCK])
    side.cache.admit(before)
    registration_id = side.park().request.registration_id
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.TRANSFER, "broken", False)
    )
    side.completed()
    side.cache.resume(side.request)
    assert side.cache.cached(side.request)[1] == 3 * BLOCK
    side.admit(0)
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    side.end()
    side.cache.manager.free(before)
    assert side.over()
    side.close()


def test_one_of_two_ranks_fails(keeper: Keeper) -> None:
    side = Side(keeper.address, world_size=2)
    registration_id = side.park().request.registration_id
    side.loads.received(0, Received(registration_id, SHARED, SIZE, 0.1))
    assert side.completed() == set()
    failed = ReceiveFailed(registration_id, FailureKind.REFUSED, "gone", True)
    side.loads.failed(1, failed)
    assert side.orders == [CancelReceive(registration_id, "gone")]
    assert side.completed() == {"p"}
    side.end()
    assert side.over()
    side.close()


def test_an_abort_under_the_read(side: Side) -> None:
    registration_id = side.park().request.registration_id
    side.end()
    assert side.completed() == {"p"}
    assert side.cache.free() < BLOCKS - 1
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.CANCELLED, "ended", False)
    )
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    assert side.over()
    assert side.last()[0] == "aborted"


def test_an_abort_after_the_read_has_failed(side: Side) -> None:
    registration_id = side.park().request.registration_id
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.LEASE, "let go", True)
    )
    side.end()
    assert side.completed() == {"p"}
    assert side.over()
