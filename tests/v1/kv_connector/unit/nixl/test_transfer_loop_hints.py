# SPDX-License-Identifier: Apache-2.0
"""READs that begin while their lease is asked for, over real NIXL."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from v1.kv_connector.unit.nixl.arena import NUM_BLOCKS, Rank, offer, request, run
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    FailureKind,
    Received,
    ReceiveFailed,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import Hint
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray

pytestmark = pytest.mark.timeout(90)

T = TransferId("t")
GENERATION = 1


def _ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int32)


HERE, THERE, OTHERS = _ids(9, 8, 3, 4), _ids(20, 21, 22, 7), _ids(1, 2, 5, 6)


class Pair:
    """A prefill rank with a computed prompt, and a decode rank that wants it."""

    def __init__(self) -> None:
        self.p = Rank("prefill", Mode.PULL)
        self.d = Rank("decode", Mode.PULL)
        rng = np.random.default_rng(1)
        self.p.pages[:] = rng.integers(1, 256, self.p.pages.shape)

    def compute(self) -> None:
        self.p.step(Expect(T, 1, ()), offer(T, HERE))

    def receive(self, blocks: BlockArray, generation: int = GENERATION) -> None:
        wanted = request(T, THERE, Mode.PULL)
        hinted = replace(wanted, hint=Hint(generation, (blocks,)))
        self.d.step(Receive(hinted, self.p.address))

    def until_idle(self) -> None:
        run(
            [self.p, self.d],
            lambda: not any((*self.p.tables.values(), *self.d.tables.values())),
        )

    def has(self, blocks: BlockArray) -> bool:
        return np.array_equal(self.p.pages[:, blocks], self.d.pages[:, THERE])

    def received(self) -> int:
        return sum(isinstance(event, Received) for event in self.d.events)

    def failure(self) -> ReceiveFailed:
        assert not self.received()
        (failed,) = (e for e in self.d.events if isinstance(e, ReceiveFailed))
        return failed

    def closed(self) -> CloseReason:
        (closed,) = (e for e in self.p.events if isinstance(e, SenderClosed))
        return closed.reason


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.d.close()
    pair.p.close()


def test_a_read_does_not_wait_for_an_answer_but_its_success_does(pair: Pair) -> None:
    pair.compute()
    pair.receive(HERE)
    # The other side hears nothing; its side channel has a thread of its own.
    run([pair.d], lambda: pair.has(HERE))
    assert pair.d.events == []
    pair.until_idle()
    assert pair.received() == 1
    assert pair.closed() is CloseReason.SERVED


@pytest.mark.parametrize(
    ("blocks", "generation"), [(OTHERS, GENERATION), (HERE, GENERATION + 1)]
)
def test_what_a_lie_has_brought_is_not_received(
    pair: Pair, blocks: BlockArray, generation: int
) -> None:
    pair.compute()
    pair.receive(blocks, generation)
    pair.until_idle()
    failed = pair.failure()
    assert failed.kind is FailureKind.LEASE
    assert pair.closed() is CloseReason.RELEASED


@pytest.mark.parametrize("outside", [NUM_BLOCKS, 2**31 - 1])
def test_blocks_that_the_other_side_lacks_are_not_read(
    pair: Pair, outside: int
) -> None:
    pair.compute()
    pair.receive(_ids(9, 8, 3, outside))
    pair.until_idle()
    failed = pair.failure()
    assert (failed.kind, failed.quiet) == (FailureKind.TRANSFER, True)
    assert failed.reason == (
        "remote_block_ids of kv_transfer_params: remote block ids reach from 3 to "
        f"{outside}, that side has {NUM_BLOCKS} blocks"
    )
    assert not pair.d.pages.any()
    assert pair.closed() is CloseReason.RELEASED


def test_an_engine_that_knows_of_no_such_prompt_says_so_soon(pair: Pair) -> None:
    """It was restarted; without a hint it would wait for the prompt."""
    pair.receive(HERE)
    run([pair.p, pair.d], lambda: bool(pair.d.events), seconds=1.5)
    assert pair.failure().kind is FailureKind.LEASE
