# SPDX-License-Identifier: Apache-2.0
"""Whose lease a renewal extends, and which of several attempts is served."""

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Offer,
    Report,
    SenderClosed,
    StartWrite,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Register,
    Want,
)

LEASE = 30.0
D, E = AgentName("d"), AgentName("e")
T, U = TransferId("t"), TransferId("u")
R, S = RegistrationId("r"), RegistrationId("s")


def _offer(transfer_id: TransferId = T) -> Offer:
    return Offer(transfer_id, 1, 10, b"", (np.array([7, 8, 9], dtype=np.int32),))


def _register(registration_id: RegistrationId, *blocks: int) -> Register:
    return Register(T, registration_id, Want(10, 0, 10, b""), (pack_blocks(blocks),))


def _closed(actions: list[Action]) -> list[TransferId]:
    return [
        action.event.transfer_id
        for action in actions
        if isinstance(action, Report) and isinstance(action.event, SenderClosed)
    ]


def test_a_renewed_hand_off_does_not_keep_those_after_it() -> None:
    table = SenderTable(LEASE, 4)
    for transfer_id in (T, U):
        table.expect(transfer_id, None, (), 0)
        table.offer(_offer(transfer_id), 0)
    table.renew([T], LEASE - 1)
    assert _closed(table.tick(LEASE + 1)) == [U]
    assert table.sizes()["sender_handoffs"] == 1


def test_a_renewal_by_another_name_than_its_own_is_nothing() -> None:
    table = SenderTable(LEASE, 4)
    table.expect(T, None, (), 0)
    table.offer(_offer(), 0)
    table.renew([U], LEASE - 1)
    assert _closed(table.tick(LEASE + 1)) == [T]


def test_a_second_attempt_by_the_same_name_is_served_for_itself() -> None:
    # A router that repeats a request may give it the id of the first.
    table = SenderTable(LEASE, 4)
    table.register(D, _register(R, 1, 2, 3), 0)
    table.register(E, _register(S, 4, 5, 6), 1)
    table.cancel(D, R, T, 2)
    table.expect(T, None, (), 3)
    (write,) = table.offer(_offer(), 4)
    assert isinstance(write, StartWrite)
    assert (write.peer, write.registration_id) == (E, S)
    assert write.remote_blocks[0].tolist() == [4, 5, 6]
