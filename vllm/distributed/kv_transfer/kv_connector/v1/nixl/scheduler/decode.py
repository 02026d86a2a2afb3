# SPDX-License-Identifier: Apache-2.0
"""The decode side: which requests wait for KV, into which blocks.

A request is WAITING until the engine allocates blocks for it, RECEIVING while it
is parked for its KV, and OVER from then on: it never asks a second time, so a
preempted or failed one is prefilled here.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ..commands import CancelReceive, Command, Receive, TellNotNeeded, Unwatch, Watch
from ..handoff.actions import Received, ReceiveFailed, ReceiveQuiet, TransferSize
from ..handoff.receiver import ReceiveRequest
from ..ids import Mode, RegistrationId, RequestId, TransferId, new_registration_id
from ..params import DecodeParams, external_id
from ..side_channel import Address
from ..stats import StatsCollector
from ..wire import Want
from .pins import Pin, PinBoard, PinState
from .prefill import LINGER_SECONDS
from .prompt import prompt_digest
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

QUARANTINE_LOG_SECONDS = 5.0
"""Blocks that are held longer for want of an answer are named in the log."""


class _Phase(Enum):
    WAITING = auto()
    RECEIVING = auto()
    OVER = auto()


@dataclass
class _Waiter:
    request_id: RequestId
    transfer_id: TransferId
    address: Address
    prompt_tokens: int
    digest: bytes
    phase: _Phase = _Phase.WAITING


class _Engine(Enum):
    """What the engine knows of an attempt's request."""

    PARKED = auto()
    FAILURE_DUE = auto()
    FAILURE_ORDERED = auto()
    TOLD = auto()


@dataclass
class _Attempt:
    registration_id: RegistrationId
    waiter: _Waiter
    pin: Pin
    started_at: float
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


class DecodeSide:
    """Hand-offs that this engine takes.

    Args:
        mode: who moves the bytes.
        block_size: tokens per block.
        world_size: worker ranks, each of which reports on its own.
        timeout: seconds that an attempt may take.
        suffix_appended: whether the engine appends a random suffix to request ids.
    """

    def __init__(
        self,
        mode: Mode,
        block_size: int,
        world_size: int,
        timeout: float,
        suffix_appended: bool,
        pins: PinBoard,
        records: Records,
        stats: StatsCollector,
    ) -> None:
        self._mode = mode
        self._block_size = block_size
        self._world_size = world_size
        self._timeout = timeout
        self._suffix_appended = suffix_appended
        self._pins = pins
        self._records = records
        self._stats = stats
        self._waiters: dict[RequestId, _Waiter] = {}
        self._attempts: dict[RegistrationId, _Attempt] = {}
        self._of_request: dict[RequestId, _Attempt] = {}
        self._completed: set[RequestId] = set()
        self._commands: list[Command] = []

    # ---- requests

    def new_request(self, request: "Request", params: DecodeParams) -> None:
        """A request whose KV another engine computes has arrived."""
        request_id = RequestId(request.request_id)
        waiter = _Waiter(
            request_id,
            self._transfer_id(request_id, params),
            (params.address.host, params.address.port),
            request.num_prompt_tokens,
            prompt_digest(request.prompt_token_ids),
        )
        self._waiters[request_id] = waiter
        self._commands.append(Watch(waiter.transfer_id, waiter.address))

    def matched(self, request_id: RequestId, computed: int) -> int:
        """Tokens to be had from the prefill engine beyond ``computed``; 0 for none.

        The engine computes the last prompt token itself in any case, so a prompt
        that is cached up to it needs nothing.
        """
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.phase is not _Phase.WAITING:
            return 0
        if waiter.prompt_tokens - 1 - computed <= 0:
            return 0
        return waiter.prompt_tokens - computed

    def allocated(
        self,
        request_id: RequestId,
        blocks: "KVCacheBlocks",
        external_tokens: int,
        now: float,
    ) -> None:
        """The engine has blocks for the request, ``external_tokens`` to be filled."""
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.phase is not _Phase.WAITING:
            return
        if external_tokens <= 0:
            waiter.phase = _Phase.OVER
            self._not_needed(waiter, receivers=1)
            return
        waiter.phase = _Phase.RECEIVING
        first = waiter.prompt_tokens - external_tokens
        want = Want(waiter.prompt_tokens, first, external_tokens, waiter.digest)
        wanted = want.block_range(self._block_size)
        table = tuple(
            group[wanted.start : wanted.stop] for group in blocks.get_block_ids()
        )
        attempt = _Attempt(
            new_registration_id(),
            waiter,
            self._pins.pin(table, PinState.EXPOSED_FOR_RECEIVE),
            started_at=now,
        )
        self._attempts[attempt.registration_id] = attempt
        self._of_request[request_id] = attempt
        self._commands.append(
            Receive(
                ReceiveRequest(
                    attempt.registration_id,
                    waiter.transfer_id,
                    want,
                    tuple(np.asarray(group, dtype=np.int32) for group in table),
                    self._timeout,
                ),
                waiter.address,
            )
        )
        self._commands.append(Unwatch(waiter.transfer_id))

    def finished(self, request: "Request") -> None:
        """The request has ended, in whatever way."""
        request_id = RequestId(request.request_id)
        waiter = self._waiters.pop(request_id, None)
        if waiter is not None and waiter.phase is _Phase.WAITING:
            # A request that the API server rejects appears here once, with a
            # placeholder for a prompt, in the name of all its children.
            rejected = request.status is RequestStatus.FINISHED_ABORTED and list(
                request.prompt_token_ids or ()
            ) == [0]
            self._not_needed(waiter, receivers=0 if rejected else 1)
        attempt = self._of_request.get(request_id)
        if attempt is None:
            return
        if attempt.engine is _Engine.PARKED:
            attempt.outcome = "aborted"
            self._commands.append(
                CancelReceive(attempt.registration_id, "the decode request has ended")
            )
            self._quarantine(attempt)
            self._tell(attempt)
        elif attempt.engine is _Engine.FAILURE_DUE:
            self._tell(attempt)

    # ---- steps

    def build(self) -> tuple[list[Command], frozenset[str], bool]:
        """Orders for the next step: commands, failures to report, reply wanted."""
        commands, self._commands = self._commands, []
        failing: list[str] = []
        for attempt in self._of_request.values():
            if attempt.engine is _Engine.FAILURE_DUE:
                attempt.engine = _Engine.FAILURE_ORDERED
                failing.append(attempt.waiter.request_id)
        return commands, frozenset(failing), bool(self._completed)

    def received(self, rank: int, event: Received) -> None:
        """A rank has all its KV."""
        attempt = self._attempts.get(event.registration_id)
        if attempt is None:
            return
        attempt.received_ranks.add(rank)
        attempt.tokens = event.tokens
        attempt.size += event.size
        attempt.seconds = max(attempt.seconds, event.seconds)
        if (
            attempt.engine is _Engine.PARKED
            and len(attempt.received_ranks) == self._world_size
        ):
            attempt.outcome = "received"
            self._tell(attempt)
        self._quiet(rank, attempt)

    def failed(self, rank: int, event: ReceiveFailed) -> None:
        """A rank will not get its KV."""
        attempt = self._attempts.get(event.registration_id)
        if attempt is None:
            return
        if not event.quiet:
            self._quarantine(attempt)
        if attempt.engine is _Engine.PARKED:
            self._stats.receive_failed(event.kind)
            attempt.engine = _Engine.FAILURE_DUE
            attempt.outcome = "failed"
            attempt.cause = event.reason
            logger.warning(
                "Hand-off %s for request %s failed: %s",
                attempt.waiter.transfer_id,
                attempt.waiter.request_id,
                event.reason,
            )
            if self._world_size > 1:
                self._commands.append(
                    CancelReceive(attempt.registration_id, event.reason)
                )
        if event.quiet:
            self._quiet(rank, attempt)

    def quiet(self, rank: int, event: ReceiveQuiet) -> None:
        """Nothing writes into a rank's blocks any more."""
        attempt = self._attempts.get(event.registration_id)
        if attempt is not None:
            self._quiet(rank, attempt)

    def warn_of_quarantine(self, now: float) -> None:
        """Name, once each, the blocks whose peer has not answered for a while."""
        for attempt in self._attempts.values():
            since = attempt.quarantined_at
            if (
                since is None
                or attempt.quarantine_logged
                or now - since < QUARANTINE_LOG_SECONDS
            ):
                continue
            attempt.quarantine_logged = True
            logger.warning(
                "Hand-off %s: %d blocks are quarantined, because the prefill engine "
                "at %s:%d may still write into them and has not answered for %.0f s. "
                "They are freed when it answers or is proven gone; restarting this "
                "engine frees them too.",
                attempt.waiter.transfer_id,
                len(attempt.pin),
                *attempt.waiter.address,
                now - since,
            )

    def complete(self, output: "KVConnectorOutput") -> None:
        """Give the engine its completions, each once."""
        for request_id in output.failed_recving:
            attempt = self._of_request.get(RequestId(request_id))
            if attempt is not None and attempt.engine is _Engine.FAILURE_ORDERED:
                attempt.engine = _Engine.TOLD
                self._drop_if_over(attempt)
        if self._completed:
            output.finished_recving = (
                output.finished_recving or set()
            ) | self._completed
            self._completed.clear()

    def release_due(self, now: float) -> bool:
        """Whether something may come at any moment, so that steps are wanted."""
        return bool(self._commands or self._completed) or any(
            now - (attempt.quarantined_at or attempt.started_at) < LINGER_SECONDS
            or (attempt.quarantined_at is not None and not attempt.quarantine_logged)
            for attempt in self._attempts.values()
        )

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {
            "decode_waiting": sum(
                waiter.phase is _Phase.WAITING
                for waiter in list(self._waiters.values())
            ),
            "decode_attempts": len(self._attempts),
            "decode_completions": len(self._completed),
        }

    # ---- internals

    def _transfer_id(self, request_id: RequestId, params: DecodeParams) -> TransferId:
        if params.transfer_id is not None:
            return params.transfer_id
        if self._mode is Mode.PULL and params.remote_request_id is not None:
            return TransferId(params.remote_request_id)
        return external_id(request_id, self._suffix_appended)

    def _not_needed(self, waiter: _Waiter, receivers: int) -> None:
        self._commands.append(Unwatch(waiter.transfer_id))
        self._commands.append(
            TellNotNeeded(waiter.transfer_id, waiter.address, receivers)
        )
        self._records.add(
            HandoffRecord(
                waiter.transfer_id, waiter.request_id, "receiver", "not_needed"
            )
        )

    def _quarantine(self, attempt: _Attempt) -> None:
        if attempt.pin.state is not PinState.QUIESCING:
            attempt.pin.state = PinState.QUIESCING
            attempt.quarantined_at = time.monotonic()

    def _tell(self, attempt: _Attempt) -> None:
        """Let the engine take its request up, or apart."""
        attempt.engine = _Engine.TOLD
        waiter = attempt.waiter
        waiter.phase = _Phase.OVER
        self._completed.add(waiter.request_id)
        self._drop_if_over(attempt)

    def _quiet(self, rank: int, attempt: _Attempt) -> None:
        attempt.quiet_ranks.add(rank)
        if len(attempt.quiet_ranks) == self._world_size:
            if attempt.quarantine_logged:
                logger.info(
                    "Hand-off %s: %d quarantined blocks are free again",
                    attempt.waiter.transfer_id,
                    len(attempt.pin),
                )
            self._pins.release(attempt.pin)
            del self._attempts[attempt.registration_id]
        self._drop_if_over(attempt)

    def _drop_if_over(self, attempt: _Attempt) -> None:
        waiter = attempt.waiter
        if attempt.engine is not _Engine.TOLD:
            return
        waiter.phase = _Phase.OVER
        if self._of_request.pop(waiter.request_id, None) is None:
            return
        self._records.add(
            HandoffRecord(
                waiter.transfer_id,
                waiter.request_id,
                "receiver",
                attempt.outcome,
                cause=attempt.cause,
                tokens=attempt.tokens if attempt.outcome == "received" else 0,
                bytes=attempt.size.bytes,
                descriptors=attempt.size.descriptors,
                seconds=attempt.seconds,
            )
        )
