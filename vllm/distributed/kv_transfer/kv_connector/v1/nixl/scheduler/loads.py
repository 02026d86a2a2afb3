# SPDX-License-Identifier: Apache-2.0
"""KV that is being obtained from other engines, for requests that are parked.

The engine is told once of each load's end. Its blocks are held from the moment at
which another engine may write them, or this one reads into them, until every rank has
proven that nothing writes there any more: by the request as long as it is parked, and
by a pin if that ends without the proof.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm.logger import init_logger

from ..commands import CancelReceive, Command, Receive
from ..handoff.actions import Received, ReceiveFailed, ReceiveQuiet, TransferSize
from ..handoff.attempts import Hint, ReceiveRequest
from ..ids import Mode, RegistrationId, RequestId, TransferId, new_registration_id
from ..later import Later
from ..params import Whereabouts
from ..side_channel import Address
from ..stats import StatsCollector
from ..timeline import Timeline
from ..wire.blocks import BlockArray
from ..wire.notifications import Want
from .pins import Block, Pin, PinBoard, PinState, block_ids
from .prefill import LINGER_SECONDS
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

QUARANTINE_LOG_SECONDS = 5.0
"""Blocks that are held longer for want of an answer are named in the log."""


class OnFailure(Enum):
    """What becomes of a request whose KV does not come."""

    POLICY = auto()
    """The engine's ``kv_load_failure_policy`` decides."""
    RECOMPUTE = auto()
    """It is computed here, whatever the policy."""


class _Engine(Enum):
    """What the engine knows of a load's request."""

    PARKED = auto()
    FAILURE_DUE = auto()
    FAILURE_ORDERED = auto()
    TOLD = auto()


@dataclass(frozen=True)
class Purpose:
    """How a kind of load is done, and recorded.

    Attributes:
        mode: whether the other side WRITEs (push) or this one READs (pull).
        role: the role in the record.
        success: the outcome in the record of one that came.
        failure: the outcome of one that did not.
        timeout: seconds that it may take.
    """

    mode: Mode
    role: str
    success: str
    failure: str
    on_failure: OnFailure
    timeout: float


@dataclass
class _Load:
    registration_id: RegistrationId
    transfer_id: TransferId
    request: "Request"
    address: Address
    purpose: Purpose
    pin: Pin
    started_at: float
    timeline: Timeline
    engine: _Engine = _Engine.PARKED
    received_ranks: set[int] = field(default_factory=set)
    quiet_ranks: set[int] = field(default_factory=set)
    tokens: int = 0
    size: TransferSize = field(default_factory=TransferSize)
    seconds: float = 0.0
    outcome: str = ""
    cause: str = ""
    quarantined_at: float | None = None
    quarantine_logged: bool = False

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.request.request_id)


class Loads:
    """All loads of this engine.

    Args:
        block_size: tokens per block.
        world_size: worker ranks, each of which reports on its own.
        commands: where orders to the workers are put.
        take_apart: makes a parked request hold no block and no computed token.
    """

    def __init__(
        self,
        block_size: int,
        world_size: int,
        pins: PinBoard,
        records: Records,
        stats: StatsCollector,
        commands: list[Command],
        take_apart: Callable[["Request"], None],
    ) -> None:
        self._block_size = block_size
        self._world_size = world_size
        self._pins = pins
        self._records = records
        self._stats = stats
        self._commands = commands
        self._take_apart = take_apart
        self._loads: dict[RegistrationId, _Load] = {}
        self._of_request: dict[RequestId, _Load] = {}
        self._completed: set[RequestId] = set()

    # ---- requests

    def begin(
        self,
        request: "Request",
        transfer_id: TransferId,
        address: Address,
        want: Want,
        table: Sequence[Sequence[Block]],
        purpose: Purpose,
        now: float,
        timeline: Timeline,
        name: TransferId | None = None,
        digest: Later[bytes] | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        """Obtain ``want`` for a request that the engine parks.

        ``table`` is the engine's own list of the request's blocks, per group; ``name``
        is what the other side calls the KV, where that is not ``transfer_id``;
        ``digest`` is that of ``want``, where it has none yet; ``whereabouts`` is where
        that side is said to have it.
        """
        want = msgspec.structs.replace(want, block_size=self._block_size)
        wanted = want.block_range(self._block_size)
        blocks = Later(functools.partial(_listed, table, wanted))
        count = len(wanted) * len(table)
        load = _Load(
            new_registration_id(),
            transfer_id,
            request,
            address,
            purpose,
            self._pins.borrow(blocks, count, PinState.EXPOSED_FOR_RECEIVE),
            started_at=now,
            timeline=timeline,
        )
        self._loads[load.registration_id] = load
        self._of_request[load.request_id] = load
        self._commands.append(
            Receive(
                ReceiveRequest(
                    load.registration_id,
                    name or transfer_id,
                    want,
                    (),
                    purpose.timeout,
                    purpose.mode,
                    _hint(whereabouts, want),
                ),
                address,
                digest,
                blocks,
            )
        )

    def finished(self, request_id: RequestId) -> None:
        """The request has ended, in whatever way."""
        load = self._of_request.get(request_id)
        if load is None:
            return
        if load.engine is _Engine.PARKED:
            load.outcome = "aborted"
            self._commands.append(
                CancelReceive(load.registration_id, "the request has ended")
            )
            self._quarantine(load)
            self._tell(load)
        elif load.engine is _Engine.FAILURE_DUE:
            self._tell(load)

    # ---- steps

    def failing(self) -> frozenset[str]:
        """Requests that the next step is to report as failed."""
        failing: list[str] = []
        for load in self._of_request.values():
            if load.engine is _Engine.FAILURE_DUE:
                load.engine = _Engine.FAILURE_ORDERED
                failing.append(load.request_id)
        return frozenset(failing)

    @property
    def completions_due(self) -> bool:
        """Whether the next step's output must come back for :meth:`complete`."""
        return bool(self._completed)

    def received(self, rank: int, event: Received) -> None:
        """A rank has all its KV."""
        load = self._loads.get(event.registration_id)
        if load is None or rank in load.received_ranks:
            return
        load.received_ranks.add(rank)
        load.tokens = event.tokens
        load.size += event.size
        load.seconds = max(load.seconds, event.seconds)
        load.timeline.merge(event.stamps)
        if (
            load.engine is _Engine.PARKED
            and len(load.received_ranks) == self._world_size
        ):
            load.outcome = load.purpose.success
            self._tell(load)
        self._quiet(rank, load)

    def failed(self, rank: int, event: ReceiveFailed) -> None:
        """A rank will not get its KV."""
        load = self._loads.get(event.registration_id)
        if load is None:
            return
        load.timeline.merge(event.stamps)
        if not event.quiet:
            self._quarantine(load)
        if load.engine is _Engine.PARKED:
            self._give_up(load, event)
        if event.quiet:
            self._quiet(rank, load)

    def quiet(self, rank: int, event: ReceiveQuiet) -> None:
        """Nothing writes into a rank's blocks any more."""
        load = self._loads.get(event.registration_id)
        if load is not None:
            self._quiet(rank, load)

    def warn_of_quarantine(self, now: float) -> None:
        """Name, once each, the blocks whose peer has not answered for a while."""
        for load in self._loads.values():
            since = load.quarantined_at
            if (
                since is None
                or load.quarantine_logged
                or now - since < QUARANTINE_LOG_SECONDS
            ):
                continue
            load.quarantine_logged = True
            logger.warning(
                "Hand-off %s: %d blocks are quarantined, because the engine at %s:%d "
                "may still write into them and has not answered for %.0f s. They are "
                "freed when it answers or is proven gone; restarting this engine "
                "frees them too.",
                load.transfer_id,
                len(load.pin),
                *load.address,
                now - since,
            )

    def complete(self, output: "KVConnectorOutput") -> None:
        """Give the engine its completions, each once."""
        for request_id in output.failed_recving:
            load = self._of_request.get(RequestId(request_id))
            if load is not None and load.engine is _Engine.FAILURE_ORDERED:
                load.engine = _Engine.TOLD
                self._drop_if_over(load)
        if self._completed:
            output.finished_recving = (
                output.finished_recving or set()
            ) | self._completed
            self._completed.clear()

    def release_due(self, now: float) -> bool:
        """Whether something may come at any moment, so that steps are wanted."""
        return bool(self._completed) or any(
            now - (load.quarantined_at or load.started_at) < LINGER_SECONDS
            or (load.quarantined_at is not None and not load.quarantine_logged)
            for load in self._loads.values()
        )

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {"loads": len(self._loads), "load_completions": len(self._completed)}

    # ---- internals

    def _give_up(self, load: _Load, event: ReceiveFailed) -> None:
        load.outcome = load.purpose.failure
        load.cause = event.reason
        # The engine, or this connector, takes the request's blocks next.
        self._pins.secure(load.pin)
        if load.purpose.on_failure is OnFailure.RECOMPUTE:
            logger.info(
                "KV of %s for request %s does not come and is computed here: %s",
                load.transfer_id,
                load.request_id,
                event.reason,
            )
            self._take_apart(load.request)
            self._tell(load)
        else:
            self._stats.receive_failed(event.kind)
            load.engine = _Engine.FAILURE_DUE
            logger.warning(
                "Hand-off %s for request %s failed: %s",
                load.transfer_id,
                load.request_id,
                event.reason,
            )
        if self._world_size > 1:
            self._commands.append(CancelReceive(load.registration_id, event.reason))

    def _quarantine(self, load: _Load) -> None:
        self._pins.secure(load.pin)
        if load.pin.state is not PinState.QUIESCING:
            load.pin.state = PinState.QUIESCING
            load.quarantined_at = time.monotonic()

    def _tell(self, load: _Load) -> None:
        """Let the engine take its request up, or apart."""
        load.engine = _Engine.TOLD
        self._completed.add(load.request_id)
        self._drop_if_over(load)

    def _quiet(self, rank: int, load: _Load) -> None:
        load.quiet_ranks.add(rank)
        if len(load.quiet_ranks) == self._world_size:
            if load.quarantine_logged:
                logger.info(
                    "Hand-off %s: %d quarantined blocks are free again",
                    load.transfer_id,
                    len(load.pin),
                )
            self._pins.release_gently(load.pin)
            del self._loads[load.registration_id]
        self._drop_if_over(load)

    def _drop_if_over(self, load: _Load) -> None:
        if load.engine is not _Engine.TOLD:
            return
        if self._of_request.pop(load.request_id, None) is None:
            return
        came = load.outcome == load.purpose.success
        self._records.add(
            HandoffRecord(
                load.transfer_id,
                load.request_id,
                load.purpose.role,
                load.outcome,
                cause=load.cause,
                tokens=load.tokens if came else 0,
                bytes=load.size.bytes,
                descriptors=load.size.descriptors,
                seconds=load.seconds,
                timeline=load.timeline,
            )
        )


def _listed(table: Sequence[Sequence[Block]], wanted: range) -> tuple[BlockArray, ...]:
    """The ids of the blocks at those positions, per group."""
    return block_ids([group[wanted.start : wanted.stop] for group in table])


def _hint(whereabouts: Whereabouts | None, want: Want) -> Hint | None:
    """What is known of the blocks that hold the wanted tokens.

    Nothing where there are several groups, whose tables need not be the same when the
    other side leases them, or where its blocks may be of another size.
    """
    if whereabouts is None or len(whereabouts.blocks) != 1:
        return None
    (blocks,) = whereabouts.blocks
    wanted = want.block_range(want.block_size)
    if len(blocks) != -(-want.prompt_tokens // want.block_size):
        return None
    return Hint(
        whereabouts.generation,
        (np.asarray(blocks[wanted.start : wanted.stop], dtype=np.int32),),
    )
