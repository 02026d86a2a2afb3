# SPDX-License-Identifier: Apache-2.0
"""The prefill side: which prompts are to be handed off, and until when."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ..commands import Command, Expect, Retract, Withdraw
from ..handoff.actions import CloseReason, Offer, Retracted, SenderClosed
from ..ids import Mode, RequestId, TransferId, new_generation
from ..later import Later
from ..params import PrefillAddress, PrefillParams, external_id, prefill_result
from ..prompt import later_digest
from ..timeline import Stage, Timeline
from .patience import is_recent
from .pins import Block, Pin, PinBoard, PinState, block_ids
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_TOLD_FIRST = (
    CloseReason.WITHDRAWN,
    CloseReason.EXPIRED,
    CloseReason.SERVED,
    CloseReason.RELEASED,
)
"""What the ranks of one hand-off may differ in; the first that one says is its outcome.
A rank that nobody asks lets go unasked."""

LINGER_SECONDS = 2.0
"""How long the engine keeps stepping for releases that are due at any moment."""


@dataclass
class _Send:
    """One hand-off.

    ``generation`` is new whenever the request begins to be computed; the pins hold
    the ``offered_blocks`` that were offered under it, the latest of them being
    ``last_offered`` per group. ``request`` is dropped when it ends, lest the engine's
    thread takes it apart in one of the connector's hooks.
    """

    transfer_id: TransferId
    request_id: RequestId
    prompt_tokens: int
    digest: Later[bytes]
    request: "Request | None"
    generation: int = 0
    pins: list[Pin] = field(default_factory=list)
    offered_blocks: int = 0
    last_offered: Sequence[Sequence[Block]] = ()
    closed_ranks: dict[int, CloseReason] = field(default_factory=dict)
    offered_at: float = 0.0
    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    timeline: Timeline = field(default_factory=Timeline.start)


@dataclass
class _Retracting:
    """Blocks of a preempted prompt, until no rank reads from them."""

    pins: list[Pin]
    since: float
    since_step: int
    quiet_ranks: set[int] = field(default_factory=set)


class PrefillSide:
    """Hand-offs that this engine provides.

    Args:
        chunked: whether a prompt is offered chunk by chunk as it is computed.
        address: this engine's side channel, told to routers.
        world_size: worker ranks, each of which reports on its own.
        suffix_appended: whether the engine appends a random suffix to request ids.
        staged: whether KV is copied after it is computed and before it can be read.
    """

    def __init__(
        self,
        mode: Mode,
        chunked: bool,
        address: PrefillAddress,
        block_size: int,
        world_size: int,
        suffix_appended: bool,
        pins: PinBoard,
        records: Records,
        staged: bool = False,
    ) -> None:
        self._mode = mode
        self._hints = mode is Mode.PULL and not staged
        self._chunked = chunked
        self._address = address
        self._block_size = block_size
        self._world_size = world_size
        self._suffix_appended = suffix_appended
        self._pins = pins
        self._records = records
        self._generations = 0
        self._step = 0
        self._waiting: dict[RequestId, _Send] = {}
        self._offered: dict[RequestId, _Send] = {}
        self._open: dict[TransferId, _Send] = {}
        self._retracting: dict[tuple[TransferId, int], _Retracting] = {}
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
            later_digest(request.prompt_token_ids),
            request,
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
        self._step += 1
        # The offers first: if they fail, the commands go out with the next step.
        for request_id in output.preempted_req_ids or ():
            send = self._waiting.get(RequestId(request_id))
            if send is not None and send.pins:
                self._retract(send, now)
        offers = [
            self._offer(send, computed, now)
            for send, computed in self._computed_after(output, now)
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
            # It ended before its prompt was computed.
            send.request = None
            self._commands.append(
                Withdraw(send.transfer_id, "the prefill request was aborted")
            )
            if send.pins:
                send.offered_at = time.monotonic()
            else:
                del self._open[send.transfer_id]
                self._record(send, "withdrawn")
            return None
        send = self._offered.pop(request_id, None)
        if send is None:
            return None
        send.request = None
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
            generation=self._generation_of(send, block_ids),
        )

    def closed(self, rank: int, event: SenderClosed) -> None:
        """A rank has let go of a hand-off; the last one frees its blocks."""
        send = self._open.get(event.transfer_id)
        if send is None or not send.pins or send.generation != event.generation:
            return
        if rank in send.closed_ranks:
            return
        send.closed_ranks[rank] = event.reason
        send.tokens = max(send.tokens, event.tokens)
        send.seconds = max(send.seconds, event.seconds)
        send.bytes += event.size.bytes
        send.descriptors += event.size.descriptors
        send.timeline.merge(event.stamps)
        if len(send.closed_ranks) < self._world_size:
            return
        self._release(send.pins)
        send.timeline.mark(Stage.RELEASED, time.monotonic())
        del self._open[send.transfer_id]
        told = send.closed_ranks.values()
        outcome = next(reason for reason in _TOLD_FIRST if reason in told)
        self._record(send, outcome.value)

    def retracted(self, rank: int, event: Retracted) -> None:
        """A rank reads no more from a preempted prompt's blocks."""
        key = event.transfer_id, event.generation
        retracting = self._retracting.get(key)
        if retracting is None:
            return
        retracting.quiet_ranks.add(rank)
        if len(retracting.quiet_ranks) == self._world_size:
            self._release(retracting.pins)
            del self._retracting[key]

    def yields_soon(self, now: float) -> bool:
        """Whether blocks of preempted prompts may be free in a step.

        A prompt that was preempted in this very step has not been seen by
        :meth:`build` yet; preempting others for its blocks would be in vain too.
        """
        return any(
            send.pins
            and send.request is not None
            and send.request.status == RequestStatus.PREEMPTED
            for send in self._waiting.values()
        ) or any(
            is_recent(now - retracting.since, self._step - retracting.since_step)
            for retracting in self._retracting.values()
        )

    def release_due(self, now: float) -> bool:
        """Whether a release may come at any moment, so that steps are wanted."""
        since = (
            *(send.offered_at for send in self._open.values() if send.pins),
            *(retracting.since for retracting in self._retracting.values()),
        )
        return bool(self._commands) or any(now - at < LINGER_SECONDS for at in since)

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {
            "prefill_waiting": len(self._waiting),
            "prefill_open": len(self._open),
            "prefill_retracting": len(self._retracting),
        }

    def _computed_after(
        self, output: "SchedulerOutput", now: float
    ) -> list[tuple[_Send, int]]:
        """Hand-offs with something to offer once this step has run.

        With each goes how many tokens of its prompt are computed then.
        """
        if not self._waiting:
            return []
        before: dict[str, int] = {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found: list[tuple[_Send, int]] = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            send = self._waiting.get(RequestId(request_id))
            if send is None:
                continue
            send.timeline.mark(Stage.PREFILL_STARTED, now)
            computed = before[request_id] + scheduled
            full_blocks = computed // self._block_size
            if computed >= send.prompt_tokens:
                found.append((send, send.prompt_tokens))
            elif self._chunked and full_blocks > send.offered_blocks:
                found.append((send, full_blocks * self._block_size))
        return found

    def _offer(self, send: _Send, computed: int, now: float) -> Offer:
        first, count = send.offered_blocks, -(-computed // self._block_size)
        # Not by their ids, of which the engine would list the whole prompt's.
        table = self._pins.blocks_of(send.request_id)
        blocks = [group[first:count] for group in table]
        if not send.pins:
            self._generations += 1
            send.generation = new_generation(self._generations)
        send.pins.append(self._pins.pin_blocks(blocks, PinState.EXPOSED_FOR_SEND))
        send.offered_blocks, send.last_offered = count, blocks
        missing = send.prompt_tokens - computed
        if not missing:
            send.offered_at = now
            self._offered[send.request_id] = self._waiting.pop(send.request_id)
        return Offer(
            send.transfer_id,
            send.generation,
            send.prompt_tokens,
            b"",
            (),
            first,
            missing,
            later_digest=send.digest,
            later_blocks=Later(functools.partial(block_ids, blocks)),
        )

    def _generation_of(self, send: _Send, table: tuple[list[int], ...]) -> int | None:
        """What D must know to read before it is answered.

        None where nobody may, and where these are not the blocks that were offered: a
        request that went on after its prompt may have been preempted, and computed
        anew into others.
        """
        if not self._hints or len(table) != len(send.last_offered):
            return None
        same = all(
            ids[: len(offered)] == [block.block_id for block in offered]
            for ids, offered in zip(table, send.last_offered, strict=True)
        )
        return send.generation if same else None

    def _retract(self, send: _Send, now: float) -> None:
        """The request has lost its blocks, and will get others."""
        self._commands.append(Retract(send.transfer_id, send.generation))
        self._retracting[send.transfer_id, send.generation] = _Retracting(
            send.pins, now, self._step
        )
        send.pins = []
        send.offered_blocks = 0

    def _release(self, pins: list[Pin]) -> None:
        # The last ones first, so that the cache keeps the beginning of a prompt
        # longest.
        for pin in reversed(pins):
            self._pins.release_gently(pin)

    def _record(self, send: _Send, outcome: str) -> None:
        self._records.add(
            HandoffRecord(
                send.transfer_id,
                send.request_id,
                "sender",
                outcome,
                tokens=send.tokens,
                bytes=send.bytes,
                descriptors=send.descriptors,
                seconds=send.seconds,
                timeline=send.timeline,
            )
        )
