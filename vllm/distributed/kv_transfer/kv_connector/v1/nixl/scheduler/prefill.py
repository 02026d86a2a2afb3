# SPDX-License-Identifier: Apache-2.0
"""The prefill side: which prompts are to be handed off, and until when."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ..commands import Command, Expect, Withdraw
from ..handoff.actions import Offer, SenderClosed
from ..ids import Mode, RequestId, TransferId
from ..params import PrefillAddress, PrefillParams, external_id, prefill_result
from .pins import Pin, PinBoard, PinState
from .prompt import prompt_digest
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

LINGER_SECONDS = 2.0
"""How long the engine keeps stepping for releases that are due at any moment."""


@dataclass
class _Send:
    transfer_id: TransferId
    request_id: RequestId
    prompt_tokens: int
    digest: bytes
    generation: int = 0
    pin: Pin | None = None
    closed_ranks: set[int] = field(default_factory=set)
    offered_at: float = 0.0
    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0


class PrefillSide:
    """Hand-offs that this engine provides.

    Args:
        address: this engine's side channel, told to routers.
        world_size: worker ranks, each of which reports on its own.
        suffix_appended: whether the engine appends a random suffix to request ids.
    """

    def __init__(
        self,
        mode: Mode,
        address: PrefillAddress,
        block_size: int,
        world_size: int,
        suffix_appended: bool,
        pins: PinBoard,
        records: Records,
    ) -> None:
        self._mode = mode
        self._address = address
        self._block_size = block_size
        self._world_size = world_size
        self._suffix_appended = suffix_appended
        self._pins = pins
        self._records = records
        self._generation = 0
        self._waiting: dict[RequestId, _Send] = {}
        self._offered: dict[RequestId, _Send] = {}
        self._open: dict[TransferId, _Send] = {}
        self._commands: list[Command] = []

    def new_request(self, request: "Request", params: PrefillParams) -> None:
        """A request whose KV is to be handed off has arrived."""
        request_id = RequestId(request.request_id)
        outside = external_id(request_id, self._suffix_appended)
        transfer_id = params.transfer_id or outside
        if transfer_id in self._open:
            logger.warning(
                "transfer_id %s of request %s is already in use by request %s; the "
                "request is prefilled without a hand-off. A router must choose a "
                "new transfer_id for every dispatch.",
                transfer_id,
                request_id,
                self._open[transfer_id].request_id,
            )
            self._records.count("sender_duplicate_transfer_id")
            return
        send = _Send(
            transfer_id,
            request_id,
            request.num_prompt_tokens,
            prompt_digest(request.prompt_token_ids),
        )
        self._waiting[request_id] = send
        self._open[transfer_id] = send
        self._commands.append(
            Expect(
                transfer_id,
                params.num_receivers,
                (TransferId(request_id), outside),
            )
        )

    def build(
        self, output: "SchedulerOutput", now: float
    ) -> tuple[list[Command], list[Offer]]:
        """Orders for the step that ``output`` schedules."""
        # The offers first: if they fail, the commands go out with the next step.
        offers = [
            self._offer(send, output, now) for send in self._complete_after(output)
        ]
        commands, self._commands = self._commands, []
        return commands, offers

    def finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """The request has ended. Returns what the client gets."""
        request_id = RequestId(request.request_id)
        send = self._waiting.pop(request_id, None)
        if send is not None:
            # It ended before its prompt was computed; nothing is pinned.
            del self._open[send.transfer_id]
            self._commands.append(
                Withdraw(send.transfer_id, "the prefill request was aborted")
            )
            self._record(send, "withdrawn")
            return None
        send = self._offered.pop(request_id, None)
        if send is None:
            return None
        if request.status not in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        ):
            self._commands.append(
                Withdraw(send.transfer_id, "the prefill request was aborted")
            )
            return None
        return prefill_result(
            mode=self._mode,
            transfer_id=send.transfer_id,
            request_id=request_id,
            address=self._address,
            block_ids=block_ids,
            num_tokens=send.prompt_tokens,
        )

    def closed(self, rank: int, event: SenderClosed) -> None:
        """A rank has let go of a hand-off; the last one frees its blocks."""
        send = self._open.get(event.transfer_id)
        if send is None or send.pin is None or send.generation != event.generation:
            return
        send.closed_ranks.add(rank)
        send.tokens = max(send.tokens, event.tokens)
        send.bytes += event.size.bytes
        send.descriptors += event.size.descriptors
        if len(send.closed_ranks) < self._world_size:
            return
        self._pins.release(send.pin)
        del self._open[send.transfer_id]
        self._record(send, event.reason.value, event.seconds)

    def release_due(self, now: float) -> bool:
        """Whether a release may come at any moment, so that steps are wanted."""
        return bool(self._commands) or any(
            send.pin is not None and now - send.offered_at < LINGER_SECONDS
            for send in self._open.values()
        )

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {
            "prefill_waiting": len(self._waiting),
            "prefill_open": len(self._open),
        }

    def _complete_after(self, output: "SchedulerOutput") -> list[_Send]:
        """Hand-offs whose prompt is computed once this step has run."""
        if not self._waiting:
            return []
        before: dict[str, int] = {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [
            send
            for request_id, scheduled in output.num_scheduled_tokens.items()
            if (send := self._waiting.get(RequestId(request_id))) is not None
            and before[request_id] + scheduled >= send.prompt_tokens
        ]

    def _offer(self, send: _Send, output: "SchedulerOutput", now: float) -> Offer:
        state = output.kv_connector_block_state
        assert state is not None
        table = state.get_block_ids(send.request_id)
        assert table is not None
        count = -(-send.prompt_tokens // self._block_size)
        blocks = tuple(group[:count] for group in table)
        self._generation += 1
        send.generation = self._generation
        send.pin = self._pins.pin(blocks, PinState.EXPOSED_FOR_SEND)
        send.offered_at = now
        self._offered[send.request_id] = self._waiting.pop(send.request_id)
        return Offer(
            send.transfer_id,
            send.generation,
            send.prompt_tokens,
            send.digest,
            tuple(np.asarray(group, dtype=np.int32) for group in blocks),
        )

    def _record(self, send: _Send, outcome: str, seconds: float = 0.0) -> None:
        self._records.add(
            HandoffRecord(
                send.transfer_id,
                send.request_id,
                "sender",
                outcome,
                tokens=send.tokens,
                bytes=send.bytes,
                descriptors=send.descriptors,
                seconds=seconds,
            )
        )
