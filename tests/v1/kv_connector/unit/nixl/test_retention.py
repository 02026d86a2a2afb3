# SPDX-License-Identifier: Apache-2.0
"""Kept KV as a cache of a real block pool: budget, age, and giving way."""

import threading
import time
from collections.abc import Iterator

import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    BLOCK,
    allocate,
    free,
)
from v1.kv_connector.unit.nixl.retention_cache import (
    TOTAL,
    TTL,
    A,
    B,
    C,
    Cache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Keep,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import new_name
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
    retention as module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.retention import (
    MAX_NAMES_OF_A_TURN,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept
from vllm.v1.core.kv_cache_manager import KVCacheBlocks


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.retention.drop_all()
    cache.close_all()
    assert cache.over()


def test_the_budget_counts_what_is_held(cache: Cache) -> None:
    assert cache.keep_new(A, 15)
    assert cache.free() == TOTAL - 15
    assert cache.pins.counts()["retained"] == 15
    assert cache.kept() == {A}
    (order,) = cache.orders
    assert isinstance(order, Keep)
    assert order.offer.transfer_id == cache.names[A][0]
    assert order.offer.prompt_tokens == 15 * BLOCK


def test_what_is_larger_than_the_budget_is_not_kept(cache: Cache) -> None:
    assert cache.keep_new(A, 3)
    assert not cache.keep_new(B, 16)
    assert cache.free() == TOTAL - 3
    assert len(cache.orders) == 1


def test_what_has_left_a_window_is_neither_counted_nor_held(cache: Cache) -> None:
    held = allocate(cache.pool, 15)
    blocks = list(held.blocks[0])
    gone = [cache.pool.null_block] * 9
    assert cache.keep(A, KVCacheBlocks((blocks[:12], [*gone, *blocks[12:]])))
    free(cache.pool, held)
    assert cache.pins.counts()["retained"] == 15
    assert cache.free() == TOTAL - 15


def test_without_a_budget_nothing_is_kept() -> None:
    cache = Cache(budget=0.0)
    assert not cache.keep_new(A, 1)
    assert cache.over()


def test_nothing_is_not_kept(cache: Cache) -> None:
    kept = Kept(new_name(), 1, 0, BLOCK, "", b"", b"", b"")
    assert not cache.retention.keep(A, kept, ([],), 0)


def test_the_oldest_goes_first(cache: Cache) -> None:
    for turn in (A, B, C):
        cache.keep_new(turn, 6)
    assert cache.retired() == cache.names[A]
    assert cache.free() == TOTAL - 12
    assert cache.retention.evicted == 1
    assert cache.kept() == {B, C}


def test_a_lookup_makes_it_the_youngest(cache: Cache) -> None:
    cache.keep_new(A, 6)
    cache.keep_new(B, 6)
    assert len(cache.retention.lookup(A)) == 1
    cache.keep_new(C, 6)
    assert cache.kept() == {A, C}


def test_shared_blocks_count_once(cache: Cache) -> None:
    held = allocate(cache.pool, 10)
    for turn in (A, B, C):
        assert cache.keep(turn, held)
    assert cache.kept() == {A, B, C}
    free(cache.pool, held)
    assert cache.free() == TOTAL - 10
    cache.retention.release(A)
    cache.close_all()
    assert cache.free() == TOTAL - 10
    assert cache.keep_new(TransferId("d"), 5)
    assert cache.kept() == {B, C, TransferId("d")}


def test_blocks_that_a_request_holds_stay_its_own(cache: Cache) -> None:
    held = allocate(cache.pool, 4)
    cache.keep(A, held)
    cache.retention.drop_all()
    assert cache.free() == TOTAL - 4
    assert all(block.ref_cnt == 1 for block in held.blocks[0])
    free(cache.pool, held)


def test_what_was_never_looked_up_goes_at_once(cache: Cache) -> None:
    cache.keep_new(A, 5)
    cache.retention.release(A)
    assert cache.free() == TOTAL
    assert cache.retired() == cache.names[A]
    assert not cache.retention.lookup(A)
    # A rank's word on it is for nobody.
    assert not cache.close(cache.names[A][0])


def test_what_was_looked_up_goes_when_every_rank_has_said_so() -> None:
    cache = Cache(world_size=2)
    cache.keep_new(A, 5)
    (found,) = cache.retention.lookup(A)
    cache.retention.release(A)
    assert not cache.retention.lookup(A)
    assert cache.retention.sizes() == {"retained": 0, "retiring": 1}
    for _ in range(2):
        assert cache.close(found.name, rank=1)
        assert cache.free() == TOTAL - 5
    assert cache.close(found.name, rank=0)
    assert cache.over()
    assert not cache.close(found.name, rank=0)
    assert cache.over()


def test_answers_of_one_turn_are_found_together(cache: Cache) -> None:
    held = allocate(cache.pool, 2)
    for _ in range(3):
        assert cache.keep(A, held)
    free(cache.pool, held)
    assert [kept.name for kept in cache.retention.lookup(A)] == cache.names[A]
    cache.retention.release(A)
    assert cache.retired() == cache.names[A]
    cache.close_all()
    assert cache.free() == TOTAL


def test_answers_of_one_turn_are_bounded(cache: Cache) -> None:
    held = allocate(cache.pool, 1)
    kept = [cache.keep(A, held) for _ in range(MAX_NAMES_OF_A_TURN + 5)]
    assert sum(kept) == MAX_NAMES_OF_A_TURN
    assert len(cache.retention.lookup(A)) == MAX_NAMES_OF_A_TURN
    free(cache.pool, held)


def test_entries_are_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    held = allocate(cache.pool, 3)
    for turn in (A, B, C):
        assert cache.keep(turn, held)
    free(cache.pool, held)
    assert cache.kept() == {B, C}


def test_age_ends_it(cache: Cache) -> None:
    cache.keep_new(A, 5, now=10.0)
    cache.keep_new(B, 5, now=11.0)
    cache.retention.tick(10.0 + TTL - 0.01)
    assert cache.retired() == []
    cache.retention.tick(10.0 + TTL)
    assert cache.retired() == cache.names[A]
    assert cache.retention.expired == 1
    cache.retention.tick(11.0 + TTL)
    assert cache.free() == TOTAL


def test_a_lookup_begins_its_life_anew(cache: Cache) -> None:
    now = time.monotonic()
    cache.keep_new(A, 5, now=now - TTL + 1)
    cache.keep_new(B, 5, now=now - TTL + 1)
    cache.retention.lookup(A)
    cache.retention.tick(now + 2)
    assert cache.retired() == cache.names[B]
    cache.retention.tick(now + TTL - 1)
    assert cache.retired() == cache.names[B]
    cache.retention.tick(time.monotonic() + TTL)
    assert cache.retired() == [*cache.names[B], *cache.names[A]]


def test_a_release_by_another_thread_waits_for_a_step(cache: Cache) -> None:
    cache.keep_new(A, 5)
    assert cache.retention.release_soon(A)
    assert not cache.retention.release_soon(B)
    assert cache.free() == TOTAL - 5
    assert cache.retention.release_due(0.0)
    cache.retention.tick(0.0)
    assert cache.free() == TOTAL
    assert not cache.retention.release_due(0.0)
    # Once more, for one that is gone since.
    cache.keep_new(B, 1)
    assert cache.retention.release_soon(B)
    cache.retention.release(B)
    cache.retention.tick(0.0)


def test_steps_are_wanted_while_a_rank_may_let_go(cache: Cache) -> None:
    cache.keep_new(A, 5)
    cache.retention.lookup(A)
    assert not cache.retention.release_due(time.monotonic())
    cache.retention.release(A)
    assert cache.retention.release_due(time.monotonic())
    assert not cache.retention.release_due(time.monotonic() + 10)


# ---- two threads


def test_nothing_is_lost_between_a_lookup_and_the_end() -> None:
    """A name that a lookup has told is never let go of before a rank's word."""
    cache = Cache(budget=0.4)
    turns = [TransferId(str(index)) for index in range(6)]
    told: set[TransferId] = set()
    failures: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        try:
            while not stop.is_set():
                for turn in turns:
                    told.update(k.name for k in cache.retention.lookup(turn))
                    cache.retention.release_soon(turn)
                    cache.retention.sizes()
        except BaseException as error:
            failures.append(error)
            raise

    reader = threading.Thread(target=look)
    reader.start()
    end = time.monotonic() + 1.5
    instant: set[TransferId] = set()
    rounds = 0
    while time.monotonic() < end and reader.is_alive():
        cache.keep_new(turns[rounds % len(turns)], 1 + rounds % 5, time.monotonic())
        if rounds % 7 == 0:
            cache.retention.make_room(TOTAL)
        if rounds % 5 == 0:
            cache.retention.drop_all()
        cache.retention.tick(time.monotonic())
        for order in cache.orders:
            if isinstance(order, Retire) and not cache.close(order.name):
                instant.add(order.name)
        cache.orders.clear()
        rounds += 1
    stop.set()
    reader.join(10)
    assert failures == []
    assert not instant & told
    assert instant
    assert told
    cache.retention.drop_all()
    cache.close_all()
    assert cache.over()
    assert cache.retention._of_turn == {}
    assert not cache.retention._held
