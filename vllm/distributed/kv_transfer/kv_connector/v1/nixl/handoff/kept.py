# SPDX-License-Identifier: Apache-2.0
"""KV that a decode engine keeps after an answer, for one worker rank.

Unlike a hand-off's, it may be read any number of times, and by whom is not known in
advance. It goes through::

    KEPT ──retire──▶ RETIRING ──▶ closed

A reader holds a lease. What is retired grants no new one and prolongs none, so it
closes when the READs under way have ended, or their leases have. A READ counts only
if its lease was not over. The reader relies on that, so that nothing but its own word,
the proof that it is gone, or the lease's end takes a lease back.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ids import KEPT_PREFIX, AgentName, RegistrationId, TransferId
from ..wire.notifications import (
    Cancelled,
    LeaseRequest,
    ReadConfirmed,
    ReadDone,
    Refused,
    Want,
)
from .actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    Send,
    SenderClosed,
    TransferSize,
)
from .claims import ClaimKey, grant, is_of, is_part
from .history import History

HISTORY = 8192
MAX_READERS = 4096
"""Leases on one entry at a time."""


def new_name() -> TransferId:
    """A name for kept KV, which nobody can guess."""
    return TransferId(KEPT_PREFIX + secrets.token_hex(16))


def is_kept(name: TransferId) -> bool:
    """Whether a message is about kept KV, and not about a hand-off."""
    return name.startswith(KEPT_PREFIX)


@dataclass
class _Lease:
    key: ClaimKey
    want: Want
    end: float


@dataclass
class _Entry:
    offer: Offer
    kept_at: float
    leases: dict[ClaimKey, _Lease] = field(default_factory=dict)
    retiring: bool = False
    tokens: int = 0


class KeptTable:
    """All kept KV of this rank.

    Args:
        lease: seconds for which a reader that says nothing may read.
        block_size: tokens per block.
    """

    def __init__(self, lease: float, block_size: int) -> None:
        self._lease = lease
        self._block_size = block_size
        self._entries: dict[TransferId, _Entry] = {}
        self._leases: dict[ClaimKey, TransferId] = {}
        self._closed: History[TransferId, bool] = History(HISTORY)
        self._ended: History[ClaimKey, bool] = History(HISTORY)

    # ---- what the scheduler side says

    def keep(self, offer: Offer, now: float) -> None:
        """KV is computed, pinned, and may be read under the offer's name."""
        self._entries[offer.transfer_id] = _Entry(offer, now)

    def retire(self, name: TransferId, now: float) -> list[Action]:
        """Close it as soon as nobody reads it."""
        entry = self._entries.get(name)
        if entry is None:
            return []
        entry.retiring = True
        return self._close_if_over(name, entry, now)

    def wind_up(self, now: float) -> list[Action]:
        """Close all of it as soon as nobody reads it."""
        return [
            action for name in list(self._entries) for action in self.retire(name, now)
        ]

    # ---- what readers say

    def lease_request(
        self, peer: AgentName, msg: LeaseRequest, now: float
    ) -> list[Action]:
        """A peer wants to read, or to read on."""
        registration_id = msg.registration_id
        key = peer, registration_id
        if self._ended.get(key) is not None:
            return [Send(peer, Refused(registration_id, "its READ has ended"))]
        entry = self._entries.get(msg.transfer_id)
        if entry is None:
            if self._closed.get(msg.transfer_id):
                return self._refuse(key, "its KV is kept no longer")
            # The order to keep it may still be on its way here.
            return []
        held = entry.leases.get(key)
        if held is None and key in self._leases:
            return []
        if held is None:
            reason = self._unfit(entry, msg.want)
            if reason is not None:
                return self._refuse(key, reason)
            held = _Lease(key, msg.want, now)
            entry.leases[key] = held
            self._leases[key] = msg.transfer_id
        elif entry.retiring:
            return []
        held.end = now + self._lease
        granted = grant(
            entry.offer, held.want, registration_id, self._lease, self._block_size
        )
        return [Send(peer, granted)]

    def read_done(self, peer: AgentName, msg: ReadDone, now: float) -> list[Action]:
        """A READ has ended; whether it counts."""
        key = peer, msg.registration_id
        found = self._find(key)
        if found is None:
            counted = bool(self._ended.get(key))
            return [Send(peer, ReadConfirmed(msg.registration_id, counted))]
        name, entry, lease = found
        counts = (
            msg.ok
            and now <= lease.end
            and is_of(msg, entry.offer, lease.want, self._block_size)
            and msg.transfer_id == name
        )
        if counts:
            entry.tokens += lease.want.num_tokens
        self._end(entry, lease, counts)
        confirmed = Send(peer, ReadConfirmed(msg.registration_id, counts))
        return [confirmed, *self._close_if_over(name, entry, now)]

    def cancel(
        self, peer: AgentName, registration_id: RegistrationId, now: float
    ) -> list[Action]:
        """A reader has given up, and reads no more."""
        key = peer, registration_id
        found = self._find(key)
        answer = Send(peer, Cancelled(registration_id))
        if found is None:
            if self._ended.get(key) is None:
                self._ended.put(key, False)
            return [answer]
        name, entry, lease = found
        self._end(entry, lease, False)
        return [answer, *self._close_if_over(name, entry, now)]

    # ---- what the transport and the clock say

    def peer_gone(self, peer: AgentName, now: float) -> list[Action]:
        """It is proven that a reader is no more."""
        return self._end_leases(lambda lease: lease.key[0] == peer, now)

    def tick(self, now: float) -> list[Action]:
        """End the leases that are over."""
        return self._end_leases(lambda lease: now > lease.end, now)

    # ---- what the shell asks

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {"kept": len(self._entries), "kept_leases": len(self._leases)}

    def peers(self) -> set[AgentName]:
        """Agents that read."""
        return {peer for peer, _ in self._leases}

    @property
    def busy(self) -> bool:
        """Whether somebody reads; merely keeping asks for nothing."""
        return bool(self._leases)

    # ---- internals

    def _find(self, key: ClaimKey) -> tuple[TransferId, _Entry, _Lease] | None:
        name = self._leases.get(key)
        if name is None:
            return None
        entry = self._entries[name]
        return name, entry, entry.leases[key]

    def _unfit(self, entry: _Entry, want: Want) -> str | None:
        if entry.retiring:
            return "its KV is about to be released"
        if len(entry.leases) >= MAX_READERS:
            return "too many read it"
        offer = entry.offer
        if want.prompt_tokens != offer.prompt_tokens or not is_part(
            want, offer, self._block_size
        ):
            return (
                f"tokens {want.first_token}+{want.num_tokens} of "
                f"{want.prompt_tokens} are no block-aligned part of the "
                f"{offer.prompt_tokens} kept"
            )
        return None

    def _refuse(self, key: ClaimKey, reason: str) -> list[Action]:
        self._ended.put(key, False)
        peer, registration_id = key
        return [Send(peer, Refused(registration_id, reason))]

    def _end(self, entry: _Entry, lease: _Lease, counted: bool) -> None:
        del entry.leases[lease.key]
        del self._leases[lease.key]
        self._ended.put(lease.key, counted)

    def _end_leases(self, over: Callable[[_Lease], bool], now: float) -> list[Action]:
        actions: list[Action] = []
        for name, entry in list(self._entries.items()):
            for lease in list(entry.leases.values()):
                if over(lease):
                    self._end(entry, lease, False)
            actions += self._close_if_over(name, entry, now)
        return actions

    def _close_if_over(
        self, name: TransferId, entry: _Entry, now: float
    ) -> list[Action]:
        if not entry.retiring or entry.leases or name not in self._entries:
            return []
        del self._entries[name]
        self._closed.put(name, True)
        reason = CloseReason.SERVED if entry.tokens else CloseReason.RELEASED
        return [
            Report(
                SenderClosed(
                    name,
                    entry.offer.generation,
                    reason,
                    entry.tokens,
                    TransferSize(),
                    now - entry.kept_at,
                )
            )
        ]
