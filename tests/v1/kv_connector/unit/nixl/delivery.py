# SPDX-License-Identifier: Apache-2.0
"""Which method of a table takes which message, as in the transfer loop."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    LeaseGranted,
    LeaseRequest,
    Message,
    NotNeeded,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
)


def to_sender(
    sender: SenderTable, peer: AgentName, message: Message, now: float
) -> list[Action]:
    """A prefill rank hears something."""
    match message:
        case Register():
            return sender.register(peer, message, now)
        case LeaseRequest():
            return sender.lease_request(peer, message, now)
        case Cancel():
            return sender.cancel(
                peer, message.registration_id, message.transfer_id, now
            )
        case NotNeeded():
            return sender.not_needed(message.transfer_id, message.receivers, now)
        case ReadDone():
            return sender.read_done(peer, message, now)
        case Renew():
            sender.renew(message.transfer_ids, now)
            return []
        case _:
            raise TypeError(f"{message} was sent to a prefill rank")


def to_receiver(
    receiver: ReceiverTable, peer: AgentName, message: Message, now: float
) -> list[Action]:
    """A decode rank hears something."""
    match message:
        case Accepted():
            return receiver.accepted(peer, message.registration_id, now)
        case LeaseGranted():
            return receiver.granted(peer, message, now)
        case Done():
            return receiver.piece(peer, message, now)
        case Finished():
            return receiver.finished(peer, message.registration_id, now)
        case Refused():
            return receiver.refused(peer, message.registration_id, message.reason, now)
        case Cancelled():
            return receiver.cancelled(peer, message.registration_id)
        case ReadConfirmed():
            return receiver.read_confirmed(
                peer, message.registration_id, message.ok, now
            )
        case _:
            raise TypeError(f"{message} was sent to a decode rank")
