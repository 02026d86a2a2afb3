# SPDX-License-Identifier: Apache-2.0
"""References on blocks of a real pool."""

import numpy as np
import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    BLOCKS,
    allocate,
    available,
    free,
    pool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.later import Later
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import (
    FEW,
    PLENTY,
    STEP_BLOCKS,
    PinBoard,
    PinState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id


@pytest.fixture
def blocks() -> BlockPool:
    return pool()


@pytest.fixture
def pins(blocks: BlockPool) -> PinBoard:
    board = PinBoard()
    board.bind(blocks)
    return board


def test_a_pinned_block_is_not_free_when_its_request_ends(
    blocks: BlockPool, pins: PinBoard
) -> None:
    held = allocate(blocks, 3)
    pin = pins.pin(held.get_block_ids(), PinState.EXPOSED_FOR_SEND)
    free(blocks, held)
    assert pins.usage() == (BLOCKS - 4, BLOCKS - 1)
    others = allocate(blocks, available(blocks))
    assert not set(others.get_block_ids()[0]) & set(held.get_block_ids()[0])
    free(blocks, others)
    pins.release(pin)
    assert pins.usage() == (BLOCKS - 1, BLOCKS - 1)


def test_a_block_may_have_several_pins(blocks: BlockPool, pins: PinBoard) -> None:
    held = allocate(blocks, 2)
    first = pins.pin(held.get_block_ids(), PinState.EXPOSED_FOR_SEND)
    second = pins.pin(held.get_block_ids(), PinState.EXPOSED_FOR_RECEIVE)
    free(blocks, held)
    second.state = PinState.QUIESCING
    assert pins.counts() == {
        "exposed_for_send": 2,
        "exposed_for_receive": 0,
        "quiescing": 2,
        "retained": 0,
    }
    pins.release(first)
    assert available(blocks) == BLOCKS - 3
    pins.release(second)
    assert available(blocks) == BLOCKS - 1
    assert not any(pins.counts().values())


def test_a_pin_is_released_once(blocks: BlockPool, pins: PinBoard) -> None:
    held = allocate(blocks, 1)
    pin = pins.pin(held.get_block_ids(), PinState.EXPOSED_FOR_SEND)
    pins.release(pin)
    with pytest.raises(KeyError):
        pins.release(pin)
    free(blocks, held)
    assert available(blocks) == BLOCKS - 1


def test_the_null_block_is_not_pinned(blocks: BlockPool, pins: PinBoard) -> None:
    pin = pins.pin([[blocks.null_block.block_id]], PinState.EXPOSED_FOR_SEND)
    assert len(pin) == 0
    pins.release(pin)
    assert available(blocks) == BLOCKS - 1


def test_a_block_in_the_free_list_can_be_pinned(
    blocks: BlockPool, pins: PinBoard
) -> None:
    # A cached block that nobody uses.
    pin = pins.pin([[5]], PinState.EXPOSED_FOR_SEND)
    assert available(blocks) == BLOCKS - 2
    pins.release(pin)
    assert available(blocks) == BLOCKS - 1


def test_nothing_is_in_use_before_there_is_a_pool() -> None:
    assert PinBoard().usage() == (0, 0)


def _ids(held: KVCacheBlocks) -> Later[tuple[BlockArray, ...]]:
    return Later(lambda: tuple(np.array(g) for g in held.get_block_ids()))


@pytest.mark.parametrize("lends", [True, False])
def test_a_borrowed_pin_holds_blocks_once_it_is_secured(
    blocks: BlockPool, lends: bool
) -> None:
    pins = PinBoard()
    pins.bind(blocks, lends=lends)
    held = allocate(blocks, 3)
    pin = pins.borrow(_ids(held), 3, PinState.EXPOSED_FOR_RECEIVE)
    assert [block.ref_cnt for block in held.blocks[0]] == [1 if lends else 2] * 3
    assert pins.counts()["exposed_for_receive"] == len(pin) == 3
    for _ in range(2):
        pins.secure(pin)
    assert [block.ref_cnt for block in held.blocks[0]] == [2] * 3
    assert len(pin) == 3
    free(blocks, held)
    assert available(blocks) == BLOCKS - 4
    pins.release(pin)
    assert available(blocks) == BLOCKS - 1


def test_a_borrowed_pin_that_was_never_secured_gives_nothing_back(
    blocks: BlockPool,
) -> None:
    pins = PinBoard()
    pins.bind(blocks, lends=True)
    held = allocate(blocks, 3)
    pins.release_gently(pins.borrow(_ids(held), 3, PinState.EXPOSED_FOR_RECEIVE))
    assert (pins.due, available(blocks)) == (0, BLOCKS - 4)
    free(blocks, held)
    assert available(blocks) == BLOCKS - 1


LONG = 5 * STEP_BLOCKS
"""Blocks of a long prompt."""

MANY = 4 * LONG
"""Blocks of a pool that has plenty of them."""


class Large:
    """A pool with plenty of blocks, in which long prompts have been pinned."""

    def __init__(self, prompts: int = 1) -> None:
        self.pool = BlockPool(MANY + 1, enable_caching=True, hash_block_size=16)
        self.pins = PinBoard()
        self.pins.bind(self.pool)
        self.held = []
        self.pinned = []
        for number in range(prompts):
            held = allocate(self.pool, LONG)
            for index, block in enumerate(held.blocks[0]):
                content = BlockHash(
                    number.to_bytes(2, "big") + index.to_bytes(2, "big")
                )
                block.set_block_hash(make_block_hash_with_group_id(content, 0))
            ids = held.get_block_ids()
            self.pinned.append(self.pins.pin(ids, PinState.EXPOSED_FOR_SEND))
            free(self.pool, held)
            self.held.append(ids[0])

    def free(self) -> int:
        return available(self.pool)


def test_many_blocks_are_given_back_over_several_steps() -> None:
    large = Large()
    large.pins.release_gently(large.pinned[0])
    assert not any(large.pins.counts().values())
    for left in range(LONG, 0, -STEP_BLOCKS):
        assert (large.pins.due, large.free()) == (left, MANY - left)
        large.pins.step()
    assert (large.pins.due, large.free()) == (0, MANY)
    large.pins.step()
    # The beginning of a prompt is what the cache keeps longest.
    order = [
        block.block_id for block in large.pool.free_block_queue.get_all_free_blocks()
    ]
    assert order[-LONG:] == large.held[0][::-1]


def test_a_backlog_goes_as_fast_as_it_comes() -> None:
    large = Large(prompts=3)
    for pin in large.pinned:
        large.pins.release_gently(pin)
    steps = 0
    while large.pins.due:
        large.pins.step()
        steps += 1
    assert steps == 3 * LONG // STEP_BLOCKS
    assert large.free() == MANY


def test_few_blocks_are_given_back_at_once() -> None:
    large = Large(prompts=0)
    held = allocate(large.pool, 2 * FEW)
    halves = held.get_block_ids()[0][:FEW], held.get_block_ids()[0][FEW:]
    first, second = (
        large.pins.pin([half], PinState.EXPOSED_FOR_SEND) for half in halves
    )
    free(large.pool, held)
    large.pins.release_gently(first)
    assert large.free() == MANY - FEW
    large.pins.release_gently(second)
    assert (large.pins.due, large.free()) == (FEW, MANY - FEW)
    large.pins.step()
    assert large.free() == MANY


def test_all_is_given_back_at_once_to_somebody_who_lacks_blocks() -> None:
    large = Large()
    large.pins.release_gently(large.pinned[0])
    assert not large.pins.make_room(MANY - LONG)
    assert large.free() == MANY - LONG
    assert large.pins.make_room(MANY - LONG + 1)
    assert (large.pins.due, large.free()) == (0, MANY)
    assert not large.pins.make_room(MANY + 1)


@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_kept_back_while_blocks_are_short(early: bool) -> None:
    large = Large()
    if early:
        large.pins.release_gently(large.pinned[0])
    others = allocate(large.pool, MANY - LONG - MANY // PLENTY + 1)
    if early:
        large.pins.step()
    else:
        large.pins.release_gently(large.pinned[0])
    assert large.pins.due == 0
    free(large.pool, others)
    assert large.free() == MANY


def test_a_block_with_another_pin_stays_when_one_is_released_gently() -> None:
    large = Large()
    again = large.pins.pin([large.held[0]], PinState.RETAINED)
    large.pins.release_gently(large.pinned[0])
    assert large.pins.make_room(MANY)
    assert large.free() == MANY - LONG
    large.pins.release(again)
    assert large.free() == MANY
