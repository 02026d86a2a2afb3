# SPDX-License-Identifier: Apache-2.0
"""The transfer loop without a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.arena import Rank, hand_off
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Command
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.inline_transfer import (
    InlineTransfer,
    start_transfers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import (
    Facts,
    PendingOffer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_loop import (
    TransferLoop,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_thread import (
    TransferThread,
)

pytestmark = pytest.mark.timeout(90)


class InlineRank(Rank):
    """A rank whose loop is driven as the forward thread does it."""

    def __init__(self, engine_id: str, mode: Mode) -> None:
        super().__init__(engine_id, mode)
        self.transfers = InlineTransfer(self._adopt)

    def _adopt(self, publish: Callable[[Facts], None]) -> TransferLoop:
        self.loop._publish = publish
        return self.loop

    def step(self, *commands: Command | PendingOffer) -> None:
        if commands:
            self.transfers.submit(commands)
        facts = self.transfers.drain()
        if facts is not None:
            self._take(facts)


@pytest.fixture(params=Mode)
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode


@pytest.fixture
def ranks(mode: Mode) -> Iterator[tuple[InlineRank, InlineRank]]:
    pair = InlineRank("prefill", mode), InlineRank("decode", mode)
    yield pair
    for rank in pair:
        rank.close()


def test_kv_is_handed_off_by_calls_alone(
    ranks: tuple[InlineRank, InlineRank],
) -> None:
    threads = threading.active_count()
    hand_off(*ranks, "inline")
    assert threading.active_count() == threads


def test_a_step_that_fails_ends_neither_the_engine_nor_the_loop(
    ranks: tuple[InlineRank, InlineRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(now: float) -> Any:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(ranks[1].loop._connections, "poll", failing)
    assert ranks[1].transfers.drain() is None
    hand_off(*ranks, "after")


PATIENCE_S = 1.5


class _Loop:
    """Publishes one event in each step."""

    def __init__(self, publish: Callable[[Facts], None]) -> None:
        self._publish = publish
        self.steps = 0
        self.closed = False

    def step(self, commands: Any) -> None:
        self.steps += 1
        event: Any = (self.steps, *commands)
        self._publish(Facts((event,), {"steps": self.steps}))

    def close(self, patience: float) -> None:
        assert patience == PATIENCE_S
        self.closed = True
        raise RuntimeError("a peer is gone")


def test_facts_are_kept_until_they_are_taken() -> None:
    made: Any = _Loop
    transfers = InlineTransfer(made)
    orders: Any = ["order"]
    transfers.submit(orders)
    facts: Any = transfers.drain()
    assert facts.events == ((1, "order"), (2,))
    assert facts.tables == {"steps": 2}
    facts = transfers.drain()
    assert facts.events == ((3,),)
    transfers.close(PATIENCE_S)
    loop: Any = transfers.loop
    assert loop.closed


def test_the_key_decides(mode: Mode) -> None:
    kinds: tuple[tuple[dict[str, bool], type], ...] = (
        ({}, TransferThread),
        ({"transfer_thread": False}, InlineTransfer),
    )
    for extra, kind in kinds:
        loop = Rank("engine", mode).loop
        on_thread = ConnectorConfig.parse(extra).transfer_thread
        started = start_transfers(on_thread, partial(_return, loop))
        assert isinstance(started, kind)
        assert started.loop is loop
        started.close()


def _return(loop: TransferLoop, publish: Callable[[Facts], None]) -> TransferLoop:
    return loop
