# SPDX-License-Identifier: Apache-2.0
"""References that the connector holds on KV cache blocks.

A pinned block is neither free nor reused, whatever becomes of its request. To touch
thousands of blocks takes the engine's thread as long as a step may, so a request's own
references serve where they last, and released blocks go back over several steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np

from ..later import Later
from ..wire.blocks import BlockArray

STEP_BLOCKS = 128
"""Blocks that a step gives back of those that were released before."""

FEW = 32
"""Blocks that are given back within the step that releases them."""

PLENTY = 8
"""Nobody may lack blocks while one in so many is free."""


_UNBOUND = "bind_kv_cache_manager has not been called"


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


Tables: TypeAlias = Callable[[str], Sequence[Sequence[Block]]]
"""The blocks of a request, per group; the engine's own lists, not to be kept."""


def block_ids(groups: Iterable[Iterable[Block]]) -> tuple[BlockArray, ...]:
    """The blocks' ids, per group."""
    return tuple(
        np.asarray([block.block_id for block in group], dtype=np.int32)
        for group in groups
    )


class PinState(StrEnum):
    """Why blocks are pinned."""

    EXPOSED_FOR_SEND = "exposed_for_send"
    EXPOSED_FOR_RECEIVE = "exposed_for_receive"
    QUIESCING = "quiescing"
    RETAINED = "retained"


class Pin:
    """One reference on each of some blocks.

    ``borrowed`` are the ids, per group, of ``size`` blocks on which the request's
    references serve yet.
    """

    def __init__(
        self,
        blocks: list[Block],
        state: PinState,
        borrowed: Later[tuple[BlockArray, ...]] | None = None,
        size: int = 0,
    ) -> None:
        self.blocks = blocks
        self.state = state
        self.borrowed = borrowed
        self._size = size

    def __len__(self) -> int:
        return len(self.blocks) if self.borrowed is None else self._size


class PinBoard:
    """All pins of this connector."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._tables: Tables | None = None
        self._lends = False
        self._pins: set[Pin] = set()
        # Freed from the end of the first one. Whole lists, since to move a block from
        # one to another touches it too.
        self._due: deque[list[Block]] = deque()
        self._num_due = 0
        self._freed = 0

    def bind(
        self, pool: Pool, tables: Tables | None = None, lends: bool = False
    ) -> None:
        """Use this pool, and these tables of requests' blocks, from now on.

        ``lends``: a parked request keeps all its blocks until this connector says that
        its load is over, so that they can be borrowed.
        """
        self._pool = pool
        self._tables = tables
        self._lends = lends

    def blocks_of(self, request_id: str) -> Sequence[Sequence[Block]]:
        """The blocks that a request has now, per group."""
        assert self._tables is not None, _UNBOUND
        return self._tables(request_id)

    def pin(self, groups: Iterable[Iterable[int]], state: PinState) -> Pin:
        """Take a reference on blocks, given by id per group."""
        return self.pin_blocks(self._known(groups), state)

    def pin_blocks(self, groups: Iterable[Iterable[Block]], state: PinState) -> Pin:
        """Take a reference on blocks."""
        pin = Pin(self._touched(groups), state)
        self._pins.add(pin)
        return pin

    def borrow(
        self, groups: Later[tuple[BlockArray, ...]], size: int, state: PinState
    ) -> Pin:
        """A pin on ``size`` blocks of a request that is being parked, by id per group.

        It must be made one of its own, with :meth:`secure`, before the request may
        lose its blocks.
        """
        if not self._lends:
            return self.pin([group.tolist() for group in groups.value], state)
        pin = Pin([], state, groups, size)
        self._pins.add(pin)
        return pin

    def secure(self, pin: Pin) -> None:
        """Take the references that a pin has borrowed so far."""
        if pin.borrowed is not None:
            ids = [group.tolist() for group in pin.borrowed.value]
            pin.blocks = self._touched(self._known(ids))
            pin.borrowed = None

    def release(self, pin: Pin) -> None:
        """Drop the references of a pin at once; a second time is an error."""
        self._pins.remove(pin)
        self._bound().free_blocks(reversed(pin.blocks))

    def release_gently(self, pin: Pin) -> None:
        """Drop the references of a pin, of many blocks over the next steps.

        A second time is an error.
        """
        self._pins.remove(pin)
        if not pin.blocks:
            return
        self._due.append(pin.blocks)
        self._num_due += len(pin.blocks)
        if self._num_due + self._freed <= FEW or self._is_short():
            self._free(self._num_due)

    def step(self) -> None:
        """Go on with what is being released; once per step."""
        self._freed = 0
        if self._num_due:
            # A part of many, so that they go as fast as they come.
            count = max(STEP_BLOCKS, self._num_due // 16)
            self._free(self._num_due if self._is_short() else count)

    def make_room(self, wanted: int) -> bool:
        """Free all that is being released, unless ``wanted`` blocks are free.

        Returns:
            Whether any were freed.
        """
        if not self._due or self._bound().get_num_free_blocks() >= wanted:
            return False
        self._free(self._num_due)
        return True

    @property
    def due(self) -> int:
        """Blocks that are still to be given back."""
        return self._num_due

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

    def _known(self, groups: Iterable[Iterable[int]]) -> list[list[Block]]:
        table = self._bound().blocks
        return [[table[block_id] for block_id in group] for group in groups]

    def _touched(self, groups: Iterable[Iterable[Block]]) -> list[Block]:
        blocks = [block for group in groups for block in group if not block.is_null]
        self._bound().touch(blocks)
        return blocks

    def _is_short(self) -> bool:
        pool = self._bound()
        return pool.get_num_free_blocks() * PLENTY < pool.num_gpu_blocks

    def _free(self, count: int) -> None:
        end = max(0, self._num_due - count)
        while self._num_due > end:
            blocks = self._due[0]
            part = blocks[end - self._num_due :]
            del blocks[end - self._num_due :]
            if not blocks:
                self._due.popleft()
            self._num_due -= len(part)
            self._freed += len(part)
            # The tail first, so that the cache keeps the beginning of a prompt longest.
            self._bound().free_blocks(reversed(part))

    def _bound(self) -> Pool:
        assert self._pool is not None, _UNBOUND
        return self._pool
