# SPDX-License-Identifier: Apache-2.0
"""A hand-off announced for one receiver that two ask for, one after the other.

A router does that when the first decode engine is lost or too busy. As long as the
second one asks before the first has given up, the KV is not let go of in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    Send,
    SenderClosed,
    StartWrite,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Refused,
    Register,
    Want,
)

BLOCK = 4
LEASE = 30.0
T = TransferId("t")
FIRST, SECOND = AgentName("first"), AgentName("second")
IDS = {FIRST: RegistrationId("r"), SECOND: RegistrationId("s")}


class Prefill:
    """The prefill side of one hand-off, and what has come of it."""

    def __init__(self) -> None:
        self.table = SenderTable(LEASE, BLOCK)
        self.served: set[AgentName] = set()
        self.refused: set[AgentName] = set()
        self.closed: list[CloseReason] = []
        self.writing: list[StartWrite] = []

    def expect(self) -> None:
        self.table.expect(T, 1, (), 0)

    def offer(self) -> None:
        blocks = np.array([7, 8, 9], dtype=np.int32)
        self._do(self.table.offer(Offer(T, 1, 10, b"d", (blocks,)), 1))

    def register(self, peer: AgentName) -> None:
        want = Want(10, 0, 10, b"d")
        message = Register(T, IDS[peer], want, (pack_blocks((1, 2, 3)),))
        self._do(self.table.register(peer, message, 1))

    def cancel(self, peer: AgentName) -> None:
        self._do(self.table.cancel(peer, IDS[peer], T, 1))

    def gives_up_unregistered(self) -> None:
        self._do(self.table.not_needed(T, 1, 1))

    def lose(self, peer: AgentName) -> None:
        self._do(self.table.peer_lost(peer, 1))

    def write(self) -> None:
        """Let all WRITEs end well."""
        while self.writing:
            one = self.writing.pop(0)
            self.served.add(one.peer)
            size = TransferSize(1, 1)
            self._do(
                self.table.written(
                    one.peer, one.registration_id, one.chunk, size, None, 2
                )
            )

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartWrite():
                    self.writing.append(action)
                case Send(peer, Refused()):
                    self.refused.add(peer)
                case Report(SenderClosed() as closed):
                    self.closed.append(closed.reason)
                case _:
                    pass


Step = Callable[[Prefill], None]


def first_registers(prefill: Prefill) -> None:
    prefill.register(FIRST)


def second_registers(prefill: Prefill) -> None:
    prefill.register(SECOND)


def first_cancels(prefill: Prefill) -> None:
    prefill.cancel(FIRST)


def first_is_lost(prefill: Prefill) -> None:
    prefill.lose(FIRST)


def offers(prefill: Prefill) -> None:
    prefill.offer()


def writes(prefill: Prefill) -> None:
    prefill.write()


@pytest.mark.parametrize("leaves", [first_cancels, first_is_lost])
def test_in_every_order_the_second_is_served_if_it_asks_first(leaves: Step) -> None:
    steps = (first_registers, second_registers, leaves, offers, writes)
    orders = 0
    for order in itertools.permutations(steps):
        at = {step: place for place, step in enumerate(order)}
        if not at[first_registers] < at[leaves] or not at[offers] < at[writes]:
            continue
        if at[second_registers] > at[leaves] or at[second_registers] > at[writes]:
            continue
        orders += 1
        prefill = Prefill()
        prefill.expect()
        for step in order:
            step(prefill)
        prefill.write()
        assert SECOND in prefill.served, order
        assert prefill.refused <= {FIRST}, order
        assert prefill.closed == [CloseReason.SERVED], order
        assert not any(prefill.table.sizes().values()), order
    assert orders > 5


@pytest.mark.parametrize("leaves", [True, False])
def test_one_that_waits_for_a_slot_may_give_up_later(leaves: bool) -> None:
    prefill = Prefill()
    prefill.expect()
    prefill.offer()
    prefill.register(SECOND)
    if leaves:
        prefill.gives_up_unregistered()
    prefill.write()
    assert prefill.served == {SECOND}
    assert prefill.closed == [CloseReason.SERVED]
    if not leaves:
        # It is told when it asks after all.
        prefill.register(FIRST)
        assert prefill.refused == {FIRST}


def test_a_first_one_that_gives_up_before_the_offer_leaves_time() -> None:
    prefill = Prefill()
    prefill.expect()
    prefill.register(FIRST)
    prefill.cancel(FIRST)
    prefill.register(SECOND)
    prefill.offer()
    prefill.write()
    assert prefill.served == {SECOND}
    assert prefill.closed == [CloseReason.SERVED]


def test_after_the_offer_the_last_one_to_give_up_ends_it() -> None:
    # This is why a router lets the first one run on until the second has answered.
    prefill = Prefill()
    prefill.expect()
    prefill.register(FIRST)
    prefill.cancel(FIRST)
    prefill.offer()
    assert prefill.closed == [CloseReason.RELEASED]
    prefill.register(SECOND)
    assert prefill.refused == {SECOND}
