# SPDX-License-Identifier: Apache-2.0
"""The decode side: which requests wait for KV that a prefill engine computes.

A request is WAITING until the engine allocates blocks for it, and OVER from then
on: it never asks a second time, so a preempted or failed one is prefilled here.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from ..commands import Command, TellNotNeeded, Unwatch, Watch
from ..ids import Mode, RequestId, TransferId
from ..later import Later
from ..params import DecodeParams, Whereabouts, external_id
from ..prompt import later_digest
from ..side_channel import Address
from ..timeline import Stage, Timeline
from ..wire.notifications import Want
from .loads import Loads, OnFailure, Purpose
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class _Phase(Enum):
    WAITING = auto()
    OVER = auto()


@dataclass
class _Waiter:
    request: "Request"
    transfer_id: TransferId
    address: Address
    prompt_tokens: int
    digest: Later[bytes]
    whereabouts: Whereabouts | None
    phase: _Phase = _Phase.WAITING
    timeline: Timeline = field(default_factory=Timeline.start)


class DecodeSide:
    """Hand-offs that this engine takes.

    Args:
        mode: who moves the bytes.
        timeout: seconds that an attempt may take.
        suffix_appended: whether the engine appends a random suffix to request ids.
        commands: where orders to the workers are put.
    """

    def __init__(
        self,
        mode: Mode,
        timeout: float,
        suffix_appended: bool,
        loads: Loads,
        records: Records,
        commands: list[Command],
    ) -> None:
        self._mode = mode
        self._purpose = Purpose(
            mode, "receiver", "received", "failed", OnFailure.POLICY, timeout
        )
        self._suffix_appended = suffix_appended
        self._loads = loads
        self._records = records
        self._commands = commands
        self._waiters: dict[RequestId, _Waiter] = {}

    def new_request(self, request: "Request", params: DecodeParams) -> TransferId:
        """A request whose KV another engine computes has arrived.

        Returns its name between the engines.
        """
        request_id = RequestId(request.request_id)
        waiter = _Waiter(
            request,
            self._transfer_id(request_id, params),
            (params.address.host, params.address.port),
            request.num_prompt_tokens,
            later_digest(request.prompt_token_ids),
            params.whereabouts if self._mode is Mode.PULL else None,
        )
        self._waiters[request_id] = waiter
        self._commands.append(Watch(waiter.transfer_id, waiter.address))
        return waiter.transfer_id

    def decline(self, request: "Request", params: DecodeParams) -> None:
        """It is computed here; the prefill engine is told so."""
        self.new_request(request, params)
        waiter = self._waiters.pop(RequestId(request.request_id))
        self._not_needed(waiter, receivers=1)

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
        waiter.phase = _Phase.OVER
        if external_tokens <= 0:
            self._not_needed(waiter, receivers=1)
            return
        waiter.timeline.mark(Stage.REGISTERED, now)
        first = waiter.prompt_tokens - external_tokens
        self._loads.begin(
            waiter.request,
            waiter.transfer_id,
            waiter.address,
            Want(waiter.prompt_tokens, first, external_tokens, b""),
            blocks.blocks,
            self._purpose,
            now,
            waiter.timeline,
            digest=waiter.digest,
            whereabouts=waiter.whereabouts,
        )
        self._commands.append(Unwatch(waiter.transfer_id))

    def finished(self, request: "Request") -> None:
        """The request has ended, in whatever way."""
        waiter = self._waiters.pop(RequestId(request.request_id), None)
        if waiter is not None and waiter.phase is _Phase.WAITING:
            # A request that the API server rejects appears here once, with a
            # placeholder for a prompt, in the name of all its children.
            rejected = request.status is RequestStatus.FINISHED_ABORTED and list(
                request.prompt_token_ids or ()
            ) == [0]
            self._not_needed(waiter, receivers=0 if rejected else 1)

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {
            "decode_waiting": sum(
                waiter.phase is _Phase.WAITING
                for waiter in list(self._waiters.values())
            ),
        }

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
                waiter.transfer_id,
                RequestId(waiter.request.request_id),
                "receiver",
                "not_needed",
                timeline=waiter.timeline,
            )
        )
