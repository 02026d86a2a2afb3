# SPDX-License-Identifier: Apache-2.0
"""Two full engines that wait for each other's blocks do not wait for ever."""

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    SenderClosed,
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
D = AgentName("d")
HELD, WANTED, THIRD = TransferId("held"), TransferId("wanted"), TransferId("third")
BLOCKS = np.array([1], dtype=np.int32)


def _offer(transfer_id: TransferId) -> Offer:
    return Offer(transfer_id, 1, 4, b"", (BLOCKS,))


def _closed(actions: list[Action]) -> list[TransferId]:
    events = [action.event for action in actions if isinstance(action, Report)]
    assert all(
        isinstance(event, SenderClosed) and event.reason is CloseReason.EXPIRED
        for event in events
    )
    return [event.transfer_id for event in events if isinstance(event, SenderClosed)]


def _crossed() -> SenderTable:
    """P holds what D does not ask for yet; D asks for what P has not computed."""
    table = SenderTable(LEASE, 4)
    for transfer_id in (HELD, WANTED, THIRD):
        table.expect(transfer_id, 1, (), 0.0)
    table.offer(_offer(HELD), 0.0)
    want = Want(4, 0, 4, b"")
    message = Register(WANTED, RegistrationId("r"), want, (pack_blocks(BLOCKS),))
    table.register(D, message, 0.0)
    return table


def _run(table: SenderTable, begin: int, end: int) -> list[TransferId]:
    """Renew and tick every second; returns what expired."""
    expired: list[TransferId] = []
    for second in range(begin, end):
        table.renew([HELD], float(second))
        expired += _closed(table.tick(float(second)))
    return expired


def test_held_kv_expires_when_nothing_else_can_be_computed() -> None:
    table = _crossed()

    assert _run(table, 1, int(2 * LEASE)) == []
    assert _run(table, int(2 * LEASE), int(2 * LEASE) + 5) == [HELD]


def test_held_kv_is_kept_while_prompts_are_computed() -> None:
    table = _crossed()
    assert _run(table, 1, 29) == []
    table.offer(_offer(THIRD), 29.0)

    # The new offer itself is not renewed and expires after its own lease.
    assert _run(table, 29, 65) == [THIRD]


def test_held_kv_is_kept_while_nobody_waits_for_other_kv() -> None:
    table = SenderTable(LEASE, 4)
    table.expect(HELD, 1, (), 0.0)
    table.expect(WANTED, 1, (), 0.0)
    table.offer(_offer(HELD), 0.0)

    assert _run(table, 1, int(4 * LEASE)) == []
