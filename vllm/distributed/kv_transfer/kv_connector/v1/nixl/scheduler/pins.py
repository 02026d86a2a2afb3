# SPDX-License-Identifier: Apache-2.0
"""References that the connector holds on KV cache blocks.

A pinned block is neither free nor reused, whatever becomes of its request.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol


class Block(Protocol):
    """What is used of the base's block."""

    block_id: int
    is_null: bool
    ref_cnt: int


class Pool(Protocol):
    """What is used of the base's block pool; on the engine thread only."""

    blocks: Sequence[Block]
    num_gpu_blocks: int
    hash_block_size: int

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop a reference of each block."""

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""


class PinState(StrEnum):
    """Why blocks are pinned."""

    EXPOSED_FOR_SEND = "exposed_for_send"
    EXPOSED_FOR_RECEIVE = "exposed_for_receive"
    QUIESCING = "quiescing"
    RETAINED = "retained"


class Pin:
    """One reference on each of some blocks."""

    def __init__(self, blocks: list[Block], state: PinState) -> None:
        self.blocks = blocks
        self.state = state

    def __len__(self) -> int:
        return len(self.blocks)


class PinBoard:
    """All pins of this connector."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._pins: set[Pin] = set()

    def bind(self, pool: Pool) -> None:
        """Use this pool from now on."""
        self._pool = pool

    def pin(self, groups: Iterable[Iterable[int]], state: PinState) -> Pin:
        """Take a reference on blocks, given by id per group."""
        pool = self._bound()
        table = pool.blocks
        blocks = [
            block
            for group in groups
            for block_id in group
            if not (block := table[block_id]).is_null
        ]
        pool.touch(blocks)
        pin = Pin(blocks, state)
        self._pins.add(pin)
        return pin

    def release(self, pin: Pin) -> None:
        """Drop the references of a pin; a second time is an error."""
        self._pins.remove(pin)
        # The tail first, so that the cache keeps the beginning of a prompt longest.
        self._bound().free_blocks(reversed(pin.blocks))

    def usage(self) -> tuple[int, int]:
        """Free blocks, and blocks in all without the null block."""
        if self._pool is None:
            return 0, 0
        return self._pool.get_num_free_blocks(), self._pool.num_gpu_blocks - 1

    def counts(self) -> dict[str, int]:
        """Pinned blocks by state."""
        counts: Counter[str] = Counter({state.value: 0 for state in PinState})
        for pin in list(self._pins):
            counts[pin.state.value] += len(pin)
        return dict(counts)

    def _bound(self) -> Pool:
        assert self._pool is not None, "bind_kv_cache_manager has not been called"
        return self._pool
