# SPDX-License-Identifier: Apache-2.0
"""Which method of a table takes which message."""

from typing import TypeAlias

from ..ids import AgentName
from ..wire.codec import printable
from ..wire.notifications import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    LeaseGranted,
    LeaseRequest,
    NotNeeded,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
)
from .actions import Action
from .kept import KeptTable
from .receiver import ReceiverTable
from .sender import SenderTable

ToSender: TypeAlias = Register | LeaseRequest | Cancel | NotNeeded | ReadDone | Renew
ToReceiver: TypeAlias = (
    Accepted | LeaseGranted | Done | Finished | Refused | Cancelled | ReadConfirmed
)
ToKept: TypeAlias = LeaseRequest | ReadDone | Cancel
HandoffMessage: TypeAlias = ToSender | ToReceiver


def to_sender(
    sender: SenderTable, peer: AgentName, message: ToSender, now: float, readers: int
) -> list[Action]:
    """A prefill rank hears something; ``readers`` ranks of that engine ask it."""
    match message:
        case Register():
            return sender.register(peer, message, now, readers)
        case LeaseRequest():
            return sender.lease_request(peer, message, now, readers)
        case Cancel():
            return sender.cancel(
                peer, message.registration_id, message.transfer_id, now, readers
            )
        case NotNeeded():
            return sender.not_needed(
                message.transfer_id, message.receivers, now, readers
            )
        case ReadDone():
            return sender.read_done(peer, message, now, readers)
        case Renew():
            sender.renew(message.transfer_ids, now)
            return []


def to_receiver(
    receiver: ReceiverTable, peer: AgentName, message: ToReceiver, now: float
) -> list[Action]:
    """A rank that obtains KV hears something."""
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
            reason = printable(message.reason)
            return receiver.refused(peer, message.registration_id, reason, now)
        case Cancelled():
            return receiver.cancelled(peer, message.registration_id)
        case ReadConfirmed():
            return receiver.read_confirmed(
                peer, message.registration_id, message.ok, now
            )


def to_kept(
    kept: KeptTable, peer: AgentName, message: ToKept, now: float
) -> list[Action]:
    """A rank that keeps KV hears something of a reader."""
    match message:
        case LeaseRequest():
            return kept.lease_request(peer, message, now)
        case ReadDone():
            return kept.read_done(peer, message, now)
        case Cancel():
            return kept.cancel(peer, message.registration_id, now)
