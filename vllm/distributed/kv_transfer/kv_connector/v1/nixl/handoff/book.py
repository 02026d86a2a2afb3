# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs and claims the prefill side knows, and by which names."""

from collections.abc import Iterable

from ..ids import TransferId
from ..timeline import Stage as Reached
from .claims import Claim, ClaimKey, Handoff, Stage
from .history import History

HISTORY = 8192
MAX_HANDOFFS = 65536


class HandoffBook:
    """All open hand-offs with their claims, and why those closed that are not.

    Args:
        lease: seconds for which one is kept that no prefill request has come for.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._handoffs: dict[TransferId, Handoff] = {}
        self._alias: dict[TransferId, TransferId] = {}
        self._claims: dict[ClaimKey, TransferId] = {}
        self._closed: History[TransferId, str] = History(HISTORY)
        self.claimed_blocks = 0

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._handoffs

    @property
    def is_full(self) -> bool:
        """Whether nobody's word but the scheduler side's opens another one."""
        return len(self._handoffs) >= MAX_HANDOFFS

    def values(self) -> list[Handoff]:
        """All open hand-offs."""
        return list(self._handoffs.values())

    def get(self, transfer_id: TransferId) -> Handoff | None:
        """The hand-off of exactly this name."""
        return self._handoffs.get(transfer_id)

    def find(self, transfer_id: TransferId) -> Handoff | None:
        """The hand-off of this name or alias."""
        if transfer_id in self._handoffs:
            return self._handoffs[transfer_id]
        return self._handoffs.get(self._alias.get(transfer_id, transfer_id))

    def open(self, transfer_id: TransferId, now: float) -> Handoff:
        """The hand-off of this name, which is awaited if it is new."""
        handoff = self._handoffs.get(transfer_id)
        if handoff is None:
            handoff = Handoff(transfer_id, Stage.AWAITED, deadline=now + self._lease)
            self._handoffs[transfer_id] = handoff
        return handoff

    def name(self, handoff: Handoff, aliases: Iterable[TransferId]) -> None:
        """Let a hand-off be found by other names, and take over who came by them."""
        for alias in aliases:
            early = self._handoffs.get(alias)
            if alias == handoff.transfer_id or alias in self._alias:
                continue
            if early is not None and early.stage is not Stage.AWAITED:
                # Another request's own name; whoever asks by it means that one.
                continue
            handoff.aliases += (alias,)
            self._alias[alias] = handoff.transfer_id
            if early is not None:
                del self._handoffs[alias]
                for claim in early.claims.values():
                    handoff.claims[claim.key] = claim
                    handoff.stamps.mark(Reached.REGISTERED, claim.claimed_at)
                    self._claims[claim.key] = handoff.transfer_id
                handoff.ended += early.ended
                handoff.released |= early.released

    def forget(self, handoff: Handoff, reason: str) -> None:
        """It is over; ``reason`` is remembered for those who ask later."""
        del self._handoffs[handoff.transfer_id]
        self.refuse_later(handoff.transfer_id, reason)
        for alias in handoff.aliases:
            del self._alias[alias]
            self.refuse_later(alias, reason)

    def refuse_later(self, transfer_id: TransferId, reason: str) -> None:
        """Remember why a name stands for nothing."""
        self._closed.put(transfer_id, reason)

    def why_closed(self, transfer_id: TransferId) -> str | None:
        """Why a name stands for nothing any more, if it ever stood for something."""
        return self._closed.get(transfer_id)

    # ---- claims

    @property
    def num_claims(self) -> int:
        """Claims on all hand-offs."""
        return len(self._claims)

    def claim(self, key: ClaimKey) -> tuple[Handoff, Claim] | None:
        """A claim and its hand-off."""
        transfer_id = self._claims.get(key)
        if transfer_id is None:
            return None
        handoff = self._handoffs[transfer_id]
        return handoff, handoff.claims[key]

    def add_claim(self, handoff: Handoff, claim: Claim) -> None:
        """A rank of a receiver wants the hand-off's KV."""
        self.claimed_blocks += claim.num_blocks
        handoff.claims[claim.key] = claim
        handoff.stamps.mark(Reached.REGISTERED, claim.claimed_at)
        self._claims[claim.key] = handoff.transfer_id

    def drop_claim(self, handoff: Handoff, claim: Claim) -> None:
        """A claim has ended."""
        self.claimed_blocks -= claim.num_blocks
        del handoff.claims[claim.key]
        del self._claims[claim.key]
