# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side tells every worker, and what comes back.

Both travel with engine steps: commands in the connector metadata of a step,
reports in its output.
"""

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .handoff.actions import Event, Offer
from .handoff.attempts import ReceiveRequest
from .ids import RegistrationId, TransferId
from .later import Later
from .side_channel import Address
from .wire.blocks import BlockArray


@dataclass(frozen=True)
class Expect:
    """P: a prefill request of this hand-off has arrived."""

    transfer_id: TransferId
    receivers: int | None
    aliases: tuple[TransferId, ...]


@dataclass(frozen=True)
class Withdraw:
    """P: serve nobody (any more) for this hand-off."""

    transfer_id: TransferId
    reason: str


@dataclass(frozen=True)
class Retract:
    """P: what was offered under that generation is taken back.

    The request is preempted and will be computed anew; report when nothing reads its
    blocks any more.
    """

    transfer_id: TransferId
    generation: int


@dataclass(frozen=True)
class Watch:
    """D: a request waits to be scheduled; keep its KV alive and connect early."""

    transfer_id: TransferId
    address: Address


@dataclass(frozen=True)
class Unwatch:
    """D: it waits no more."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Receive:
    """D: obtain KV from the engine at ``address``.

    ``digest`` and ``blocks`` are what the request lacks of them.
    """

    request: ReceiveRequest
    address: Address
    digest: Later[bytes] | None = None
    blocks: Later[tuple[BlockArray, ...]] | None = None

    def complete(self) -> ReceiveRequest:
        """The request with what is left to be computed of it."""
        request = self.request
        if self.digest is not None:
            want = msgspec.structs.replace(request.want, digest=self.digest.value)
            request = replace(request, want=want)
        if self.blocks is not None:
            request = replace(request, blocks=self.blocks.value)
        return request


@dataclass(frozen=True)
class CancelReceive:
    """D: the attempt is over; report when its blocks are safe."""

    registration_id: RegistrationId
    reason: str


@dataclass(frozen=True)
class TellNotNeeded:
    """D: tell P that ``receivers`` requests (0: all) will not ask."""

    transfer_id: TransferId
    address: Address
    receivers: int


@dataclass(frozen=True)
class Keep:
    """D: KV of an answer is kept and may be read under the offer's name."""

    offer: Offer


@dataclass(frozen=True)
class Retire:
    """D: let nobody begin to read it any more; report when nobody reads it."""

    name: TransferId


Command: TypeAlias = (
    Expect
    | Withdraw
    | Retract
    | Watch
    | Unwatch
    | Receive
    | CancelReceive
    | TellNotNeeded
    | Keep
    | Retire
)


@dataclass
class NixlConnectorMetadata(KVConnectorMetadata):
    """One step's orders to the workers.

    Attributes:
        commands: to be acted on before the forward pass.
        offers: KV that is computed once this step's forward pass is.
        report_failed: requests to be reported as failed loads in this step.
        reply: whether the worker must answer even if it has nothing to report,
            because the scheduler side has completions to inject, or blocks to give
            back in the steps that follow.
        computes: whether the step has a forward pass.
    """

    commands: tuple[Command, ...] = ()
    offers: tuple[Offer, ...] = ()
    report_failed: frozenset[str] = frozenset()
    reply: bool = False
    computes: bool = True


@dataclass(frozen=True)
class RankReport:
    """Facts of one worker rank, in the order in which they became true."""

    rank: int
    events: tuple[Event, ...]
    tables: dict[str, int]


@dataclass
class NixlWorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of all ranks of one step."""

    reports: list[RankReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NixlWorkerMetadata":
        """Join the reports of another rank."""
        assert isinstance(other, NixlWorkerMetadata)
        return NixlWorkerMetadata(self.reports + other.reports)


@dataclass
class NixlHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One worker's encoded :class:`~.wire.ranks.RankInfo`, for the side channel."""

    rank_info: bytes
