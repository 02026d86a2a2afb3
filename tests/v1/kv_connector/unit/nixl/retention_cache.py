# SPDX-License-Identifier: Apache-2.0
"""Kept KV on a real block pool, with the words of ranks that there are not."""

from v1.kv_connector.unit.nixl.engine_side import (
    BLOCK,
    BLOCKS,
    allocate,
    available,
    free,
    pool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import new_name
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import PinBoard
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.retention import (
    Retention,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

TTL = 100.0
TOTAL = BLOCKS - 1
A, B, C = (TransferId(name) for name in "abc")


class Cache:
    """Retention on a pool of 31 blocks, with its workers' words."""

    def __init__(
        self, world_size: int = 1, budget: float = 0.5, watermark: float = 0.0
    ) -> None:
        self.pool = pool()
        self.pins = PinBoard()
        self.pins.bind(self.pool)
        self.orders: list[Command] = []
        self.retention = Retention(
            world_size, TTL, budget, watermark, self.pins, self.orders
        )
        self.names: dict[TransferId, list[TransferId]] = {}

    def keep(self, turn: TransferId, held: KVCacheBlocks, now: float = 0.0) -> bool:
        """A request that holds these blocks has ended; it still holds them."""
        blocks = held.get_block_ids()
        name = new_name()
        tokens = len(blocks[0]) * BLOCK
        kept = Kept(name, 1, tokens, BLOCK, "", b"", b"", b"")
        done = self.retention.keep(turn, kept, blocks, now)
        if done:
            self.names.setdefault(turn, []).append(name)
        return done

    def keep_new(self, turn: TransferId, count: int, now: float = 0.0) -> bool:
        # As for a request that waits.
        self.pins.make_room(count)
        held = allocate(self.pool, count)
        done = self.keep(turn, held, now)
        free(self.pool, held)
        return done

    def retired(self) -> list[TransferId]:
        """Names that the workers were told to let go of."""
        return [order.name for order in self.orders if isinstance(order, Retire)]

    def close(self, name: TransferId, rank: int = 0) -> bool:
        closed = SenderClosed(name, 1, CloseReason.RELEASED, 0, TransferSize(), 1.0)
        return self.retention.closed(rank, closed)

    def close_all(self) -> None:
        for name in self.retired():
            self.close(name)

    def kept(self) -> set[TransferId]:
        return {turn for turn in self.names if self.retention.lookup(turn)}

    def free(self) -> int:
        return available(self.pool)

    def over(self) -> bool:
        self.pins.step()
        return self.free() == TOTAL and not any(
            (*self.retention.sizes().values(), *self.pins.counts().values())
        )
