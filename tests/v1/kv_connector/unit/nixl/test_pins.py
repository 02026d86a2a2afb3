# SPDX-License-Identifier: Apache-2.0
"""References on blocks of a real pool."""

import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    BLOCKS,
    allocate,
    available,
    free,
    pool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import (
    PinBoard,
    PinState,
)
from vllm.v1.core.block_pool import BlockPool


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
