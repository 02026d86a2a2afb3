# SPDX-License-Identifier: Apache-2.0
"""Where ranks of decode engines claim KV: who is let in, gets what, and is told what.

With the last claim on it a hand-off may be over, so it is closed here too.
"""

from ..ids import TransferId
from ..wire.notifications import Accepted, Refused
from .actions import Action, CloseReason, Report, Send
from .book import HISTORY, HandoffBook
from .claims import (
    Answer,
    Claim,
    ClaimKey,
    ClaimState,
    Handoff,
    Stage,
    grant,
    next_writes,
    share,
    unfit,
    why_closed,
)
from .history import History

MAX_CLAIMS_PER_HANDOFF = 4096
MAX_CLAIMED_BLOCKS = 1 << 26
"""Block ids that all claims together may hold: 256 MiB."""


class ClaimDesk:
    """The claims on a rank's hand-offs, from being made to being answered.

    Args:
        handoffs: the book that lists both.
        lease: seconds for which a reader that says nothing may read.
        block_size: tokens per block.
    """

    def __init__(self, handoffs: HandoffBook, lease: float, block_size: int) -> None:
        self._handoffs = handoffs
        self._lease = lease
        self._block_size = block_size
        self._outcomes: History[ClaimKey, Answer] = History(HISTORY)
        self._refusal: str | None = None

    def refuse_unknown(self, reason: str) -> None:
        """From now on a claim opens no hand-off: no prefill request will come."""
        self._refusal = reason

    def outcome(self, key: ClaimKey) -> Answer | None:
        """What the claim's rank was told at its end, if it has ended."""
        return self._outcomes.get(key)

    def settle(self, key: ClaimKey, answer: Answer) -> None:
        """End what was never claimed; a claim that comes later gets this answer."""
        self._outcomes.put(key, answer)

    def claim(
        self, transfer_id: TransferId, claim: Claim, readers: int
    ) -> list[Action]:
        """A rank claims, or says again that it does.

        ``readers`` ranks of its engine speak to this one.
        """
        key, now = claim.key, claim.claimed_at
        answer = self._outcomes.get(key)
        if answer is not None:
            return [Send(claim.peer, answer)]
        accepted = Send(claim.peer, Accepted(claim.registration_id))
        found = self._handoffs.claim(key)
        if found is not None:
            _, known = found
            if known.state is ClaimState.LEASED:
                return [self._grant(*found, now)]
            return [accepted]
        handoff = self._handoffs.find(transfer_id)
        if handoff is None:
            reason = self._handoffs.why_closed(transfer_id) or self._refusal
            if reason is not None:
                return self.reject(key, reason)
            if self._handoffs.is_full:
                return self.reject(key, "too many hand-offs")
            handoff = self._handoffs.open(transfer_id, now)
        if handoff.withdrawn is not None:
            return self.reject(key, handoff.withdrawn)
        if len(handoff.claims) >= MAX_CLAIMS_PER_HANDOFF:
            return self.reject(key, "too many receivers")
        if self._handoffs.claimed_blocks + claim.num_blocks > MAX_CLAIMED_BLOCKS:
            return self.reject(key, "too many blocks are claimed")
        claim.share = share(1, readers)
        self._handoffs.add_claim(handoff, claim)
        actions: list[Action] = []
        if handoff.stage is not Stage.OFFERED:
            actions.append(accepted)
        if handoff.offer is not None:
            actions += self.serve(handoff, claim, now)
        return actions + self.close_if_over(handoff, now)

    def claim_known(
        self, transfer_id: TransferId, claim: Claim, readers: int
    ) -> list[Action]:
        """The same, where the claim is nothing without a hand-off that is known."""
        if self._handoffs.find(transfer_id) is None:
            return []
        return self.claim(transfer_id, claim, readers)

    def reject(self, key: ClaimKey, reason: str) -> list[Action]:
        """Refuse what was never claimed.

        The receiver gives its blocks away on this answer, so that a repetition
        must get it too, even if its ``transfer_id`` is in use again by then.
        """
        peer, registration_id = key
        answer = Refused(registration_id, reason)
        self._outcomes.put(key, answer)
        return [Send(peer, answer)]

    def serve(self, handoff: Handoff, claim: Claim, now: float) -> list[Action]:
        """Give a claim what is computed for it and was not given yet."""
        computed = handoff.computed
        assert computed is not None
        reason = unfit(computed.offer, claim, self._block_size)
        if reason is not None:
            return self.refuse(handoff, claim, reason)
        if claim.blocks is not None:
            return [*next_writes(computed, claim, self._block_size)]
        if not computed.complete:
            return []
        claim.state = ClaimState.LEASED
        claim.leased_at = now
        return [self._grant(handoff, claim, now)]

    def refuse(self, handoff: Handoff, claim: Claim, reason: str) -> list[Action]:
        """End a claim for a reason that its rank is told."""
        return self.end(handoff, claim, Refused(claim.registration_id, reason))

    def end(self, handoff: Handoff, claim: Claim, answer: Answer) -> list[Action]:
        """End a claim; returns the answer to its receiver's rank."""
        self._handoffs.drop_claim(handoff, claim)
        self._outcomes.put(claim.key, answer)
        handoff.ended += claim.share
        return [Send(claim.peer, answer)]

    def close_if_over(self, handoff: Handoff, now: float) -> list[Action]:
        """Close a hand-off that nobody claims, if nobody may or will claim it."""
        if handoff.claims or handoff.transfer_id not in self._handoffs:
            return []
        if handoff.withdrawn is not None:
            return self.close(handoff, CloseReason.WITHDRAWN, now)
        if handoff.stage is not Stage.OFFERED:
            return []
        if handoff.released or handoff.ended >= (handoff.receivers or 1):
            return self.close(handoff, handoff.result, now)
        return []

    def close(self, handoff: Handoff, reason: CloseReason, now: float) -> list[Action]:
        """Close it; what was computed for it is reported."""
        self._handoffs.forget(handoff, why_closed(reason, handoff, self._lease))
        closed = handoff.closed(reason, now)
        return [] if closed is None else [Report(closed)]

    def _grant(self, handoff: Handoff, claim: Claim, now: float) -> Send:
        offer = handoff.offer
        assert offer is not None
        claim.lease_end = now + self._lease
        granted = grant(
            offer, claim.want, claim.registration_id, self._lease, self._block_size
        )
        return Send(claim.peer, granted)
