# SPDX-License-Identifier: Apache-2.0
"""A prefill side and a decode engine's side channel, for later turns."""

import time
from collections.abc import Callable

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import (
    HISTORY,
    NEXT,
    Cache,
    content,
    prompt,
)
from v1.kv_connector.unit.nixl.engine_side import BLOCK, BLOCKS
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import EarlierTurn
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.loads import Loads
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import PinBoard
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import Records
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.reuse import ReuseSide
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import StatsCollector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

T = TransferId("turn-1")
NAME = TransferId("kept-0")
TIMEOUT = 20.0
SHORT = 0.3
"""For questions that nobody answers."""

SIZE = TransferSize(1000, 2)
SHARED = len(HISTORY) - 1


def kept_of(tokens: list[int] = HISTORY, name: TransferId = NAME) -> Kept:
    """What a decode engine keeps after an answer that ends these tokens."""
    return content().describe(prompt("d", tokens), len(tokens) - 1, name, 1)


class Keeper:
    """The side channel of a decode engine."""

    def __init__(
        self, answer: Callable[[], tuple[Kept, ...]], token: Token | None = None
    ) -> None:
        self.address = free_address()
        self.asked: list[TransferId] = []
        self._answer = answer
        self._server = SideChannelServer(self.address, [encode(HERE)], self, token)

    def integrity(self) -> object:
        return {}

    def handoffs(self) -> object:
        return []

    def failure(self, transfer_id: TransferId) -> object:
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        self.asked.append(transfer_id)
        return self._answer()

    def release(self, transfer_id: TransferId) -> object:
        return None

    def close(self) -> None:
        self._server.close()


class Side:
    """The prefill side with its surroundings, and one request."""

    def __init__(
        self,
        address: Address,
        threshold: int = 1,
        tokens: list[int] = NEXT,
        world_size: int = 1,
        token: Token | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.cache = Cache()
        self.pins = PinBoard()
        self.pins.bind(self.cache.manager.block_pool, lends=True)
        self.records = Records()
        self.orders: list[Command] = []
        self.loads = Loads(
            BLOCK,
            world_size,
            self.pins,
            self.records,
            StatsCollector(),
            self.orders,
            self.take_apart,
        )
        self.reuse = ReuseSide(
            threshold, timeout, 20.0, content(), self.loads, self.records, token
        )
        self.request = prompt("p", tokens)
        self.name = RequestId("p")
        earlier = EarlierTurn(T, *address)
        self.reuse.new_request(self.request, earlier, time.monotonic())

    def take_apart(self, request: Request) -> None:
        self.cache.manager.free(request)
        request.num_computed_tokens = 0

    def matched(self) -> int | None:
        _, computed = self.cache.cached(self.request)
        return self.reuse.matched(self.name, computed)

    def known(self) -> int:
        """What is matched, once that is known."""
        end = time.monotonic() + TIMEOUT + 15
        while (count := self.matched()) is None:
            assert time.monotonic() < end
            time.sleep(0.002)
        return count

    def admit(self, external: int) -> None:
        blocks = self.cache.admit(self.request, external)
        assert blocks is not None
        self.reuse.allocated(self.name, blocks, external, time.monotonic())

    def park(self) -> Receive:
        """Go on until the READ is ordered."""
        self.admit(self.known())
        (order,) = self.orders
        assert isinstance(order, Receive)
        self.orders.clear()
        return order

    def completed(self) -> set[str]:
        output = KVConnectorOutput()
        self.loads.complete(output)
        return output.finished_recving or set()

    def end(self) -> None:
        self.reuse.finished(self.name)
        self.loads.finished(self.name)
        self.cache.manager.free(self.request)

    def over(self) -> bool:
        sizes = (*self.reuse.sizes().values(), *self.loads.sizes().values())
        return self.cache.free() == BLOCKS - 1 and not any(
            (*sizes, *self.pins.counts().values())
        )

    def last(self) -> tuple[object, object, object]:
        record = self.records.latest()[-1]
        assert (record["role"], record["transfer_id"]) == ("reader", T)
        return record["outcome"], record["tokens"], record["cause"]

    def close(self) -> None:
        self.reuse.close()
