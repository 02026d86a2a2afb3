# SPDX-License-Identifier: Apache-2.0
"""The prefill side of hand-offs, for one worker rank.

A hand-off exists from the moment that its prefill request is known here or a
decode engine asks for it, whichever comes first::

    AWAITED ──expect──▶ EXPECTED ──offer──▶ OFFERED ──▶ closed
       └─────────────────offer──────────────────▲

A receiver is an engine of one or more ranks. Each that needs something from here
claims it under the engine's registration, and the claim goes through::

    WAITING ──▶ WRITING ──▶ ended (done, failed, cancelled)      push
    WAITING ──▶ LEASED  ──▶ ended (read, cancelled, expired)     pull

A READ may have begun before its lease was granted, by what this engine has told the
router. It counts if it has read the leased blocks of that very generation, which are
pinned since before anybody was told of them, and its lease is not over. Its reader
relies on the lease without asking again, so only the reader's word, the proof that it
is gone, or the lease's end takes it back.

A hand-off closes when as many receivers as were announced have ended on all their
ranks (one where none were announced), or its lease ends while nobody holds a claim,
or it is withdrawn; never while a WRITE of it is posted. How many ranks of an engine
speak to this one is told with each message, as ``readers``.
"""

from collections.abc import Iterable

from ..ids import AgentName, RegistrationId, TransferId
from ..timeline import Stage as Reached
from ..wire.blocks import unpack_blocks
from ..wire.codec import WireError
from ..wire.notifications import (
    Cancelled,
    Finished,
    LeaseRequest,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
)
from .actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    Retracted,
    Send,
    SenderClosed,
    TransferSize,
)
from .book import HandoffBook
from .claims import (
    Answer,
    Claim,
    ClaimState,
    Stage,
    answer_to_written,
    is_early,
    is_of,
    share,
)
from .computed import Computed
from .desk import ClaimDesk


class SenderTable:
    """All hand-offs that this rank may have to serve.

    Args:
        lease: seconds for which computed KV is kept without a sign of life from
            the decode side, and for which an early claim waits for its prefill
            request to arrive.
        block_size: tokens per block.
    """

    def __init__(self, lease: float, block_size: int) -> None:
        self._lease = lease
        self._block_size = block_size
        self._handoffs = HandoffBook(lease)
        self._desk = ClaimDesk(self._handoffs, lease, block_size)
        self._offered_at = float("-inf")

    # ---- what the scheduler side says

    def expect(
        self,
        transfer_id: TransferId,
        receivers: int | None,
        aliases: Iterable[TransferId],
        now: float,
    ) -> None:
        """A prefill request for ``transfer_id`` is in this engine."""
        handoff = self._handoffs.open(transfer_id, now)
        if handoff.stage is Stage.AWAITED:
            handoff.stage = Stage.EXPECTED
        handoff.receivers = receivers
        self._handoffs.name(handoff, aliases)

    def offer(
        self, offer: Offer, now: float, computed_at: float | None = None
    ) -> list[Action]:
        """KV of the prompt, or of its next chunk, is computed and pinned.

        It was computed at ``computed_at``, or now.
        """
        handoff = self._handoffs.get(offer.transfer_id)
        if handoff is None:
            # It was withdrawn while its computation was under way.
            event = SenderClosed(
                offer.transfer_id,
                offer.generation,
                CloseReason.WITHDRAWN,
                tokens=0,
                size=TransferSize(),
                seconds=0.0,
            )
            return [Report(event)]
        if offer.generation <= handoff.retracted:
            return []
        known = handoff.computed
        if known is None or known.offer.generation != offer.generation:
            known = handoff.computed = Computed.of(offer)
        else:
            known.add(offer)
        if known.complete:
            self._offered_at = now
            handoff.stage = Stage.OFFERED
            handoff.offered_at = now
            handoff.stamps.mark(Reached.PREFILL_ENDED, computed_at or now)
            handoff.deadline = now + self._lease
        actions: list[Action] = []
        if handoff.withdrawn is None:
            for claim in list(handoff.claims.values()):
                actions += self._desk.serve(handoff, claim, now)
        actions += self._desk.close_if_over(handoff, now)
        return actions

    def retract(self, transfer_id: TransferId, generation: int) -> list[Action]:
        """The prefill request is preempted; it will be computed anew.

        What is written stays written, since the same tokens give the same KV.
        """
        handoff = self._handoffs.get(transfer_id)
        if handoff is not None:
            handoff.retracted = generation
            if handoff.offer is not None and handoff.offer.generation <= generation:
                handoff.computed = None
            if handoff.is_read_from(generation):
                handoff.retracting.add(generation)
                return []
        return [Report(Retracted(transfer_id, generation))]

    def withdraw(
        self, transfer_id: TransferId, reason: str, now: float
    ) -> list[Action]:
        """The prefill request has ended without, or in spite of, an offer."""
        handoff = self._handoffs.get(transfer_id)
        if handoff is None:
            self._handoffs.refuse_later(transfer_id, reason)
            return []
        handoff.withdrawn = reason
        actions: list[Action] = []
        for claim in list(handoff.claims.values()):
            if claim.state is ClaimState.WAITING:
                actions += self._desk.refuse(handoff, claim, reason)
        actions += self._desk.close_if_over(handoff, now)
        return actions

    def wind_up(self, reason: str, now: float) -> list[Action]:
        """Nothing is computed any more: refuse all but what is computed already."""
        self._desk.refuse_unknown(reason)
        actions: list[Action] = []
        for handoff in self._handoffs.values():
            if handoff.stage is Stage.EXPECTED:
                actions += self.withdraw(handoff.transfer_id, reason, now)
            elif handoff.stage is Stage.AWAITED:
                for claim in list(handoff.claims.values()):
                    actions += self._desk.refuse(handoff, claim, reason)
                self._handoffs.forget(handoff, reason)
        return actions

    # ---- what decode engines say

    def register(
        self, peer: AgentName, msg: Register, now: float, readers: int = 1
    ) -> list[Action]:
        """A rank of D has reserved blocks to be written."""
        key = peer, msg.registration_id
        try:
            blocks = tuple(unpack_blocks(group) for group in msg.blocks)
        except WireError as error:
            if self._handoffs.claim(key) is not None:
                return []
            return self._desk.reject(key, str(error))
        claim = Claim(msg.registration_id, peer, msg.want, blocks, now)
        return self._desk.claim(msg.transfer_id, claim, readers)

    def lease_request(
        self, peer: AgentName, msg: LeaseRequest, now: float, readers: int = 1
    ) -> list[Action]:
        """A rank of D wants to read."""
        claim = Claim(msg.registration_id, peer, msg.want, None, now)
        return self._desk.claim(msg.transfer_id, claim, readers)

    def cancel(
        self,
        peer: AgentName,
        registration_id: RegistrationId,
        transfer_id: TransferId,
        now: float,
        readers: int = 1,
    ) -> list[Action]:
        """A rank of D wants its blocks back.

        It is told when nothing of this rank writes there any more.
        """
        key, answer = (peer, registration_id), Cancelled(registration_id)
        found = self._handoffs.claim(key)
        if found is None:
            if self._desk.outcome(key) is not None:
                return [Send(peer, answer)]
            # The cancellation has overtaken its registration, which must be
            # refused when it comes.
            self._desk.settle(key, answer)
            return [Send(peer, answer), *self.not_needed(transfer_id, 1, now, readers)]
        handoff, claim = found
        if claim.state is ClaimState.WRITING:
            claim.cancel_requested = True
            return []
        actions = self._desk.end(handoff, claim, answer)
        return actions + self._desk.close_if_over(handoff, now)

    def not_needed(
        self, transfer_id: TransferId, receivers: int, now: float, readers: int = 1
    ) -> list[Action]:
        """One of the ranks of ``receivers`` requests (0: all) will not ask for it."""
        handoff = self._handoffs.find(transfer_id)
        if handoff is None:
            if self._handoffs.why_closed(transfer_id) is not None:
                return []
            if self._handoffs.is_full:
                return []
            handoff = self._handoffs.open(transfer_id, now)
        handoff.ended += share(receivers, readers)
        handoff.released |= receivers == 0
        return self._desk.close_if_over(handoff, now)

    def renew(self, transfer_ids: Iterable[TransferId], now: float) -> None:
        """Decode requests still wait to ask for these.

        Not heeded while the engine is stuck: what it holds for them may be the room
        that it lacks for prompts whose decode engines hold the room that these
        wait for.
        """
        if self._stuck(now):
            return
        for transfer_id in transfer_ids:
            handoff = self._handoffs.find(transfer_id)
            if handoff is not None and handoff.stage is not Stage.AWAITED:
                handoff.deadline = max(handoff.deadline, now + self._lease)

    def read_done(
        self, peer: AgentName, msg: ReadDone, now: float, readers: int = 1
    ) -> list[Action]:
        """D's READ has ended. It counts only if the blocks were still leased."""
        key = peer, msg.registration_id
        actions: list[Action] = []
        outcome = self._desk.outcome(key)
        found = self._handoffs.claim(key)
        if found is None and outcome is None and msg.ok:
            # The LeaseRequest before this was lost, or has been overtaken.
            late = Claim(msg.registration_id, peer, msg.want, None, now)
            actions += self._desk.claim_known(msg.transfer_id, late, readers)
            found = self._handoffs.claim(key)
        if found is None:
            read = isinstance(outcome, Finished)
            return [*actions, Send(peer, ReadConfirmed(msg.registration_id, read))]
        handoff, claim = found
        if msg.ok and is_early(handoff, claim):
            return actions
        valid = (
            claim.state is ClaimState.LEASED
            and handoff.offer is not None
            and is_of(msg, handoff.offer, claim.want, self._block_size)
            and now <= claim.lease_end
            and msg.ok
        )
        if valid:
            handoff.provided(claim)
            handoff.moved(claim.leased_at, now)
        handoff.lapsed |= now > claim.lease_end
        answer: Answer = (
            Finished(msg.registration_id)
            if valid
            else Refused(msg.registration_id, "the READ failed or outlived its lease")
        )
        actions.append(Send(peer, ReadConfirmed(msg.registration_id, valid)))
        self._desk.end(handoff, claim, answer)
        return actions + self._desk.close_if_over(handoff, now)

    # ---- what the transport says

    def written(
        self,
        peer: AgentName,
        registration_id: RegistrationId,
        chunk: int,
        size: TransferSize,
        failure: str | None,
        now: float,
        period: tuple[float, float] | None = None,
    ) -> list[Action]:
        """The WRITE of a chunk to a peer has ended, well where no failure is given.

        ``period`` is when its posting began and when it ended.
        """
        found = self._handoffs.claim((peer, registration_id))
        if found is None:
            return []
        handoff, claim = found
        generation = claim.writes.pop(chunk)
        handoff.size += size
        if period is not None and failure is None:
            handoff.moved(*period)
        claim.failure = claim.failure or failure
        actions: list[Action] = []
        if generation in handoff.retracting and not handoff.is_read_from(generation):
            handoff.retracting.remove(generation)
            actions.append(Report(Retracted(handoff.transfer_id, generation)))
        if claim.writes:
            return actions
        claim.state = ClaimState.WAITING
        answer = answer_to_written(handoff, claim)
        if answer is None:
            return actions
        if isinstance(answer, Finished):
            handoff.provided(claim)
        told = self._desk.end(handoff, claim, answer)
        if not claim.abandoned and not isinstance(answer, Finished):
            # Else the last piece has carried the news itself, or nobody listens.
            actions += told
        return actions + self._desk.close_if_over(handoff, now)

    def peer_lost(self, peer: AgentName, now: float) -> list[Action]:
        """``peer`` does not answer, but may still read."""
        return self._give_up_on(peer, (ClaimState.WAITING,), now)

    def peer_gone(self, peer: AgentName, now: float) -> list[Action]:
        """It is proven that ``peer`` is no more."""
        return self._give_up_on(peer, (ClaimState.WAITING, ClaimState.LEASED), now)

    def _give_up_on(
        self, peer: AgentName, states: tuple[ClaimState, ...], now: float
    ) -> list[Action]:
        actions: list[Action] = []
        for handoff in self._handoffs.values():
            for claim in list(handoff.claims.values()):
                if claim.peer != peer:
                    continue
                if claim.state is ClaimState.WRITING:
                    claim.abandoned = True
                elif claim.state in states:
                    self._desk.refuse(handoff, claim, "the decode engine was lost")
            actions += self._desk.close_if_over(handoff, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Act on what has run out of time."""
        actions: list[Action] = []
        for handoff in self._handoffs.values():
            for claim in list(handoff.claims.values()):
                if claim.state is ClaimState.LEASED and now > claim.lease_end:
                    self._desk.refuse(handoff, claim, "the lease has ended")
                    handoff.lapsed = True
            if now > handoff.deadline and not handoff.claims:
                if handoff.stage is Stage.OFFERED:
                    actions += self._desk.close(handoff, CloseReason.EXPIRED, now)
                elif handoff.stage is Stage.AWAITED:
                    self._handoffs.forget(handoff, "no prefill request came for it")
            elif handoff.stage is Stage.AWAITED and now > handoff.deadline:
                reason = (
                    f"no prefill request with transfer_id {handoff.transfer_id} "
                    f"arrived within {self._lease:g} s"
                )
                for claim in list(handoff.claims.values()):
                    actions += self._desk.refuse(handoff, claim, reason)
                self._handoffs.forget(handoff, reason)
            else:
                actions += self._desk.close_if_over(handoff, now)
        return actions

    # ---- what the shell asks

    def sizes(self) -> dict[str, int]:
        """Entries per table; all zero when nothing is under way."""
        return {
            "sender_handoffs": len(self._handoffs),
            "sender_claims": self._handoffs.num_claims,
        }

    def peers(self) -> set[AgentName]:
        """Agents that hold a claim."""
        return {
            claim.peer
            for handoff in self._handoffs.values()
            for claim in handoff.claims.values()
        }

    @property
    def unclaimed(self) -> int:
        """Prompts whose KV is computed, and that nobody has asked for yet."""
        return sum(
            handoff.stage is Stage.OFFERED and not handoff.claims
            for handoff in self._handoffs.values()
        )

    @property
    def busy(self) -> bool:
        """Whether a message about a hand-off may come at any moment."""
        return bool(self._handoffs)

    @property
    def urgent(self) -> bool:
        """Whether a hand-off may go on as soon as a message comes.

        One that waits for computation does not, whatever comes.
        """
        return any(
            handoff.computed is not None
            and (not handoff.claims or handoff.stage is Stage.OFFERED)
            for handoff in self._handoffs.values()
        )

    # ---- internals

    def _stuck(self, now: float) -> bool:
        """Whether a claim has waited a lease's length, and no prompt was computed."""
        return any(
            now - max(claim.claimed_at, self._offered_at) > self._lease
            for handoff in self._handoffs.values()
            if handoff.stage is Stage.EXPECTED
            for claim in handoff.claims.values()
        )
