# SPDX-License-Identifier: Apache-2.0
"""What the state machines ask their shell to do, and the facts they report."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from ..ids import AgentName, RegistrationId, TransferId
from ..later import Later
from ..timeline import Stamps
from ..wire.blocks import BlockArray
from ..wire.notifications import Message, Want


@dataclass(frozen=True)
class Offer:
    """KV that an engine has computed and pinned: of a whole prompt, or of a chunk.

    ``blocks`` holds, per KV cache group, the block ids from position ``first_block``
    on. The offers of one generation follow each other without a gap, and together
    hold all but the last ``missing_tokens``; all but the last one end with a full
    block. Each may come in ``parts``, one after the other, of which this is number
    ``part``: the KV of so many consecutive layers.
    """

    transfer_id: TransferId
    generation: int
    prompt_tokens: int
    digest: bytes
    blocks: tuple[BlockArray, ...]
    first_block: int = 0
    missing_tokens: int = 0
    part: int = 0
    parts: int = 1
    later_digest: Later[bytes] | None = None
    later_blocks: Later[tuple[BlockArray, ...]] | None = None

    def complete(self) -> "Offer":
        """The same with what is left to be computed of its digest and blocks."""
        digest, blocks = self.later_digest, self.later_blocks
        if digest is None and blocks is None:
            return self
        return replace(
            self,
            digest=self.digest if digest is None else digest.value,
            blocks=self.blocks if blocks is None else blocks.value,
            later_digest=None,
            later_blocks=None,
        )

    @property
    def computed_tokens(self) -> int:
        """Tokens from the start of the prompt whose KV is there."""
        return self.prompt_tokens - self.missing_tokens

    def joined(self, following: "Offer") -> "Offer":
        """This one and the next of its generation as one."""
        blocks = tuple(
            np.concatenate(pair)
            for pair in zip(self.blocks, following.blocks, strict=True)
        )
        return replace(following, blocks=blocks, first_block=self.first_block)


@dataclass(frozen=True)
class Send:
    """Send one notification."""

    peer: AgentName
    message: Message


@dataclass(frozen=True)
class StartWrite:
    """WRITE a part of the layers of local blocks to the peer's; report each piece.

    It is chunk number ``chunk`` of the registration, and perhaps the last one, of the
    tokens ``want``. Each side's tables begin with the block that holds the first of
    them, by its own block size.
    """

    peer: AgentName
    registration_id: RegistrationId
    chunk: int
    last: bool
    want: Want
    local_blocks: tuple[BlockArray, ...]
    remote_blocks: tuple[BlockArray, ...]
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class StartRead:
    """READ ``want`` from the peer's blocks into the local ones.

    The tables are as for :class:`StartWrite`.
    """

    peer: AgentName
    registration_id: RegistrationId
    want: Want
    local_blocks: tuple[BlockArray, ...]
    remote_blocks: tuple[BlockArray, ...]


class CloseReason(StrEnum):
    """Why a prefill engine has let go of a hand-off's KV."""

    SERVED = "served"
    RELEASED = "released"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True)
class TransferSize:
    """What one registration moved, as seen by the side that posted it."""

    bytes: int = 0
    descriptors: int = 0

    def __add__(self, other: "TransferSize") -> "TransferSize":
        return TransferSize(
            self.bytes + other.bytes, self.descriptors + other.descriptors
        )


@dataclass(frozen=True)
class SenderClosed:
    """P: no handle of this rank uses the hand-off's blocks any more."""

    transfer_id: TransferId
    generation: int
    reason: CloseReason
    tokens: int
    size: TransferSize
    seconds: float
    stamps: Stamps = field(default_factory=Stamps, compare=False)


@dataclass(frozen=True)
class Retracted:
    """P: no handle of this rank uses the blocks of that generation any more."""

    transfer_id: TransferId
    generation: int


@dataclass(frozen=True)
class Received:
    """D: all wanted KV is in this rank's blocks, and nothing writes there now."""

    registration_id: RegistrationId
    tokens: int
    size: TransferSize
    seconds: float
    stamps: Stamps = field(default_factory=Stamps, compare=False)


class FailureKind(StrEnum):
    """Why KV did not come, coarsely; the label of a metric."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    TRANSFER = "transfer"
    LEASE = "lease"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ReceiveFailed:
    """D: the KV will not come.

    ``quiet`` tells whether it is proven that nothing writes into the blocks; if
    not, a :class:`ReceiveQuiet` follows once it is.
    """

    registration_id: RegistrationId
    kind: FailureKind
    reason: str
    quiet: bool
    stamps: Stamps = field(default_factory=Stamps, compare=False)


@dataclass(frozen=True)
class ReceiveQuiet:
    """D: proof that nothing writes into the blocks of a failed or cancelled one."""

    registration_id: RegistrationId


Event: TypeAlias = SenderClosed | Retracted | Received | ReceiveFailed | ReceiveQuiet


@dataclass(frozen=True)
class Report:
    """Give this fact to the scheduler side."""

    event: Event


Action: TypeAlias = Send | StartWrite | StartRead | Report
