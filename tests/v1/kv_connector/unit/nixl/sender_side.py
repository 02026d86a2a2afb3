# SPDX-License-Identifier: Apache-2.0
"""The prefill side's table and what it is told, for tests that go case by case."""

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Offer,
    Report,
    Send,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    pack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Message,
    Refused,
    Register,
    Want,
)

BLOCK = 4
LEASE = 30.0
D, E = AgentName("d"), AgentName("e")
T, U = TransferId("t"), TransferId("u")
R, S = RegistrationId("r"), RegistrationId("s")
MOVED = TransferSize(100, 2)


def new_table() -> SenderTable:
    """A table without hand-offs."""
    return SenderTable(LEASE, BLOCK)


def offered(transfer_id: TransferId = T, generation: int = 1) -> Offer:
    """KV of a prompt of 10 tokens, in three blocks."""
    return Offer(
        transfer_id, generation, 10, b"digest", (np.array([7, 8, 9], dtype=np.int32),)
    )


def wanted(first: int = 0, prompt: int = 10, digest: bytes = b"digest") -> Want:
    """What a receiver lacks that has the tokens before ``first``."""
    return Want(prompt, first, prompt - first, digest)


def registration(
    registration_id: RegistrationId = R,
    transfer_id: TransferId = T,
    want: Want | None = None,
    blocks: tuple[int, ...] = (1, 2, 3),
) -> Register:
    """The claim of a receiver that is written to."""
    want = wanted() if want is None else want
    return Register(transfer_id, registration_id, want, (pack_blocks(blocks),))


def sent(actions: list[Action]) -> list[Message]:
    """The messages among actions."""
    return [action.message for action in actions if isinstance(action, Send)]


def refusal(actions: list[Action]) -> str:
    """The reason in the refusal that is all there is to say."""
    (message,) = sent(actions)
    assert isinstance(message, Refused)
    return message.reason


def closings(actions: list[Action]) -> list[SenderClosed]:
    """The ends of hand-offs among actions."""
    return [
        action.event
        for action in actions
        if isinstance(action, Report) and isinstance(action.event, SenderClosed)
    ]


def written(table: SenderTable, now: float, failure: str | None = None) -> list[Action]:
    """The WRITE to receiver R of D ends."""
    return table.written(D, R, 0, MOVED, failure, now)
