# SPDX-License-Identifier: Apache-2.0
"""Kept KV gives way before anything else suffers."""

import random
import time
from collections.abc import Iterator

import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    allocate,
    free,
)
from v1.kv_connector.unit.nixl.retention_cache import (
    TOTAL,
    A,
    B,
    C,
    Cache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
    patience as module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.patience import (
    YIELD_SECONDS,
    YIELD_STEPS,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.retention.drop_all()
    cache.close_all()
    assert cache.over()


def test_room_is_made_of_the_oldest(cache: Cache) -> None:
    for turn in (A, B, C):
        cache.keep_new(turn, 5)
    cache.retention.make_room(TOTAL - 9)
    assert cache.retired() == [*cache.names[A], *cache.names[B]]
    assert cache.free() == TOTAL - 5


def test_no_room_is_made_where_there_is_enough(cache: Cache) -> None:
    cache.keep_new(A, 5)
    cache.retention.make_room(TOTAL - 5)
    assert cache.retired() == []


def test_what_is_about_to_close_counts_as_room(cache: Cache) -> None:
    for turn in (A, B, C):
        cache.keep_new(turn, 5)
        cache.retention.lookup(turn)
    for _ in range(3):
        cache.retention.make_room(TOTAL - 10)
    assert cache.retired() == cache.names[A]
    assert cache.free() == TOTAL - 15


def test_what_does_not_close_counts_no_more(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in (A, B):
        cache.keep_new(turn, 5)
        cache.retention.lookup(turn)
    cache.retention.make_room(TOTAL - 5)
    monkeypatch.setattr(module, "YIELD_SECONDS", 0.0)
    for _ in range(YIELD_STEPS):
        assert cache.retired() == cache.names[A]
        cache.retention.tick(0.0)
        cache.retention.make_room(TOTAL - 5)
    assert cache.retired() == [*cache.names[A], *cache.names[B]]


def test_blocks_that_others_hold_are_no_room(cache: Cache) -> None:
    held = allocate(cache.pool, 5)
    cache.keep(A, held)
    cache.keep_new(B, 5)
    cache.retention.make_room(TOTAL - 5)
    assert cache.retired() == [*cache.names[A], *cache.names[B]]
    assert cache.free() == TOTAL - 5
    free(cache.pool, held)


@pytest.mark.parametrize("seed", range(40))
def test_no_more_is_let_go_of_than_is_wanted(seed: int) -> None:
    cache = Cache(budget=1.0)
    rng = random.Random(seed)
    held = allocate(cache.pool, 20)
    blocks = held.blocks[0]
    turns = [TransferId(str(index)) for index in range(rng.randint(1, 6))]
    parts = []
    for turn in turns:
        part = rng.sample(blocks, rng.randint(1, 8))
        assert cache.keep(turn, KVCacheBlocks((part,)))
        parts.append({block.block_id for block in part})
    kept_on = blocks[: rng.randint(0, 5)]
    used = {block.block_id for block in kept_on}
    cache.pool.free_blocks(blocks[len(kept_on) :])
    for turn in turns:
        if rng.random() < 0.5:
            cache.retention.lookup(turn)
    order = list(cache.retention._entries)
    position = {
        cache.names[turn][0]: part for turn, part in zip(turns, parts, strict=True)
    }
    after = [
        TOTAL - len(used.union(*(position[name] for name in order[gone:])))
        for gone in range(len(order) + 1)
    ]
    wanted = rng.randint(0, TOTAL)
    expected = next((k for k, room in enumerate(after) if room >= wanted), len(order))
    cache.retention.make_room(wanted)
    assert cache.retired() == order[:expected]
    cache.close_all()
    assert cache.free() == after[expected]
    cache.pool.free_blocks(kept_on)
    cache.retention.drop_all()
    cache.close_all()
    assert cache.over()


def test_the_watermark_is_kept_free() -> None:
    cache = Cache(watermark=0.2)
    cache.keep_new(A, 5)
    cache.keep_new(B, 5)
    held = allocate(cache.pool, TOTAL - 10)
    cache.retention.tick(0.0)
    assert cache.retired() == [*cache.names[A], *cache.names[B]]
    assert cache.free() == 10
    free(cache.pool, held)
    assert cache.over()


def test_a_running_request_gets_what_nobody_has_looked_up(cache: Cache) -> None:
    cache.keep_new(A, 3)
    held = allocate(cache.pool, TOTAL - 3)
    assert cache.retention.yield_some(0.0)
    assert cache.free() == 3
    assert not cache.retention.yield_some(0.0)
    free(cache.pool, held)


def test_a_running_request_waits_a_bounded_time_for_readers(cache: Cache) -> None:
    cache.keep_new(A, 10)
    cache.retention.lookup(A)
    held = allocate(cache.pool, TOTAL - 10)
    now = time.monotonic()
    waited = 0
    while cache.retention.yield_some(time.monotonic()):
        waited += 1
        cache.retention.tick(time.monotonic())
        # Other requests, which need little, find it.
        cache.retention.make_room(0)
        assert time.monotonic() - now < YIELD_SECONDS + 5
        time.sleep(0.01)
    assert waited >= YIELD_STEPS
    assert time.monotonic() - now >= YIELD_SECONDS
    assert cache.retired() == cache.names[A]
    assert not cache.retention.yield_some(time.monotonic())
    free(cache.pool, held)


def test_every_shortage_has_its_own_wait(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "YIELD_SECONDS", 0.0)
    for turn in (A, B):
        cache.keep_new(turn, 7)
        cache.retention.lookup(turn)
        held = allocate(cache.pool, cache.free())
        steps = 0
        while cache.retention.yield_some(time.monotonic()):
            steps += 1
            cache.retention.tick(0.0)
        assert steps == YIELD_STEPS
        free(cache.pool, held)
        cache.close_all()
        for _ in range(2):
            cache.retention.tick(0.0)


def test_a_wait_ends_when_the_ranks_let_go(cache: Cache) -> None:
    cache.keep_new(A, 10)
    cache.retention.lookup(A)
    held = allocate(cache.pool, TOTAL - 10)
    assert cache.retention.yield_some(0.0)
    cache.close_all()
    assert cache.free() == 10
    free(cache.pool, held)


def test_a_few_are_let_go_of_at_a_time(cache: Cache) -> None:
    turns = [TransferId(str(index)) for index in range(15)]
    for turn in turns:
        cache.keep_new(turn, 1)
    held = allocate(cache.pool, TOTAL - 15)
    assert cache.retention.yield_some(0.0)
    assert cache.free() == 8
    free(cache.pool, held)


def test_nothing_to_give_is_nothing_to_wait_for(cache: Cache) -> None:
    cache.keep_new(A, 3)
    held = allocate(cache.pool, TOTAL - 3)
    assert cache.retention.yield_some(0.0)
    assert cache.retention.exhausted == 0
    held += allocate(cache.pool, 3)
    assert not cache.retention.yield_some(0.0)
    assert cache.retention.exhausted == 1
    free(cache.pool, held)


def test_all_can_be_dropped(cache: Cache) -> None:
    for turn in (A, B, C):
        cache.keep_new(turn, 5)
    cache.retention.lookup(B)
    cache.retention.drop_all()
    assert cache.retention.sizes() == {"retained": 0, "retiring": 1}
    assert cache.free() == TOTAL - 5
    assert cache.kept() == set()
