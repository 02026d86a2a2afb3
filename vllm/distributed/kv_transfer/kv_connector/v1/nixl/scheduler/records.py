# SPDX-License-Identifier: Apache-2.0
"""What became of the latest hand-offs, for people, tools and tests."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ids import RequestId, TransferId
from ..timeline import Role, Timeline

KEPT = 1024


@dataclass(frozen=True)
class HandoffRecord:
    """One side's view of a finished hand-off.

    Attributes:
        role: ``sender`` (prefill) or ``receiver`` (decode), or ``reader`` (prefill,
            of an earlier turn).
        outcome: of a sender ``served``, ``released`` (nobody wanted it, or got it),
            ``expired``, ``withdrawn``; of a receiver ``received``, ``failed``,
            ``aborted``, ``not_needed``.
        cause: why it failed, if it did.
        tokens, bytes, descriptors: what was moved.
        seconds: sender: from the end of prefill to the release of the blocks;
            receiver: from registration to the last byte.
        timeline: when it reached each of its stages; the last of them may come
            after the record.
    """

    transfer_id: TransferId
    request_id: RequestId
    role: str
    outcome: str
    cause: str = ""
    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    timeline: Timeline | None = field(default=None, compare=False)

    def described(self) -> dict[str, object]:
        """All of it, in types that JSON has."""
        known: dict[str, object] = {
            name: value for name, value in vars(self).items() if name != "timeline"
        }
        if self.timeline is not None:
            known.update(self.timeline.described(Role(self.role)))
        return known


class Records:
    """A bounded history with totals. Written on the engine thread.

    Args:
        added: is given each record, once.
    """

    def __init__(self, added: Callable[[HandoffRecord], None] | None = None) -> None:
        self._kept: deque[HandoffRecord] = deque(maxlen=KEPT)
        self._totals: Counter[str] = Counter()
        self._added = added

    def add(self, record: HandoffRecord) -> None:
        """Keep one more."""
        self._kept.append(record)
        self._totals[f"{record.role}_{record.outcome}"] += 1
        self._totals[f"{record.role}_tokens"] += record.tokens
        self._totals[f"{record.role}_bytes"] += record.bytes
        if self._added is not None:
            self._added(record)

    def count(self, name: str) -> None:
        """Count something that is no hand-off."""
        self._totals[name] += 1

    def latest(self) -> list[dict[str, object]]:
        """The kept ones, oldest first."""
        return [record.described() for record in self._kept.copy()]

    def failure(self, transfer_id: TransferId) -> dict[str, object] | None:
        """The latest record of one hand-off that tells a cause, else the latest.

        One failed receiver of several ends the others, which then have no cause.
        """
        found = [r for r in self._kept.copy() if r.transfer_id == transfer_id]
        told = [record for record in found if record.cause]
        return (told or found)[-1].described() if found else None

    def totals(self) -> dict[str, int]:
        """Counts by role and outcome, and sums of tokens and bytes."""
        return dict(self._totals)
