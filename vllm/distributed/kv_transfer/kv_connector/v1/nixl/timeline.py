# SPDX-License-Identifier: Apache-2.0
"""When a hand-off reached each of its stages, and what it waited for in between.

Stamps are readings of ``time.monotonic``, which processes of one host share and
those of two hosts do not. So every duration is computed on one side of a hand-off,
and a stamp of a process on another host is left out. The time of day at which the
request was queued goes with a timeline, so that the two sides can be laid side by
side, as exactly as the hosts' clocks agree.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .process import this_process


class Stage(StrEnum):
    """What a hand-off has come to, in the usual order.

    Those of a sender: queued, prefill started, registered (a decode engine has
    asked for the KV), first posted, prefill ended, last posted (the transfer of
    what was computed last has been posted; or its READ was allowed), written (the
    last transfer has ended), released (the blocks are the engine's again).

    Those of a receiver: queued, registered (blocks are allocated for the KV), asked
    (the prefill engine was sent the registration), answered (it has been heard of
    for the first time), first notification (some KV has come), prefill ended (some
    of the last chunk has come), last notification (all has come), first step (the
    engine has scheduled the request with its KV).
    """

    QUEUED = "queued"
    PREFILL_STARTED = "prefill_started"
    REGISTERED = "registered"
    ASKED = "asked"
    ANSWERED = "answered"
    FIRST_POSTED = "first_posted"
    FIRST_NOTIFICATION = "first_notification"
    PREFILL_ENDED = "prefill_ended"
    LAST_POSTED = "last_posted"
    WRITTEN = "written"
    LAST_NOTIFICATION = "last_notification"
    FIRST_STEP = "first_step"
    RELEASED = "released"


_AT_THE_LAST = frozenset(
    {Stage.PREFILL_ENDED, Stage.LAST_POSTED, Stage.WRITTEN, Stage.LAST_NOTIFICATION}
)
"""Stages that all parts must have reached; the others the first part reaches."""


class Wait(StrEnum):
    """What a hand-off waits for.

    COMPUTE: an engine is busy, or computes the prompt. COORDINATION: the engines
    wait for each other's messages, or for the next turn of a loop. TRANSFER: bytes
    move, and nothing else has to happen.
    """

    COMPUTE = "compute"
    COORDINATION = "coordination"
    TRANSFER = "transfer"


class Role(StrEnum):
    """Which side of a hand-off."""

    SENDER = "sender"
    RECEIVER = "receiver"
    READER = "reader"


@dataclass(frozen=True)
class Phase:
    """A part of a hand-off, from the end of the one before it.

    It ends at the first of the stages ``until`` that is known, or where the part
    before it ended, if that is later.
    """

    name: str
    waits_for: Wait
    until: tuple[Stage, ...]


_SENDING = (
    Phase("queue", Wait.COMPUTE, (Stage.PREFILL_STARTED,)),
    Phase("prefill", Wait.COMPUTE, (Stage.PREFILL_ENDED,)),
    Phase("claim", Wait.COORDINATION, (Stage.REGISTERED,)),
    Phase("post", Wait.COORDINATION, (Stage.LAST_POSTED,)),
    Phase("transfer", Wait.TRANSFER, (Stage.WRITTEN,)),
    Phase("release", Wait.COORDINATION, (Stage.RELEASED,)),
)

_RECEIVING = (
    Phase("queue", Wait.COMPUTE, (Stage.REGISTERED,)),
    Phase("connect", Wait.COORDINATION, (Stage.ASKED,)),
    Phase("answer", Wait.COORDINATION, (Stage.ANSWERED,)),
    Phase("prefill_wait", Wait.COMPUTE, (Stage.PREFILL_ENDED, Stage.LAST_NOTIFICATION)),
    Phase("transfer", Wait.TRANSFER, (Stage.LAST_NOTIFICATION,)),
    Phase("resume", Wait.COORDINATION, (Stage.FIRST_STEP,)),
)

PHASES: Mapping[Role, tuple[Phase, ...]] = {
    Role.SENDER: _SENDING,
    Role.RECEIVER: _RECEIVING,
    Role.READER: _RECEIVING,
}

TOTAL = "total"
WAITING = {
    Wait.COMPUTE: "waiting_for_compute",
    Wait.COORDINATION: "waiting_for_coordination",
}


def durations(role: Role) -> tuple[str, ...]:
    """The names of all that :meth:`Timeline.durations` may give for a role."""
    return (*(phase.name for phase in PHASES[role]), *WAITING.values(), TOTAL)


_HOST = this_process().boot_id


@dataclass
class Stamps:
    """What one worker rank adds to a hand-off's timeline.

    Only one thread writes into it, until it is handed over.

    Attributes:
        host: names the host whose clock was read; empty if it has no name.
        chunks: how many chunks were moved, each counted for every pair of ranks
            between which it was.
    """

    host: str = _HOST
    at: dict[Stage, float] = field(default_factory=dict)
    chunks: int = 0

    def mark(self, stage: Stage, at: float) -> None:
        """``stage`` was reached at ``at``, by one more part of the hand-off."""
        known = self.at.get(stage)
        if known is None or (at > known if stage in _AT_THE_LAST else at < known):
            self.at[stage] = at


@dataclass(frozen=True)
class Span:
    """One phase of one hand-off; times are in seconds since it was queued."""

    phase: Phase
    start: float
    end: float


class Timeline:
    """One side's view of one hand-off, from the moment that it was queued.

    Args:
        queued: when that was, on the monotonic clock.
        queued_at: the same moment in seconds since 1970.
    """

    def __init__(self, queued: float, queued_at: float) -> None:
        self.queued_at = queued_at
        self._stamps = Stamps(_HOST, {Stage.QUEUED: queued})

    @classmethod
    def start(cls) -> "Timeline":
        """A request is queued now."""
        return cls(time.monotonic(), time.time())

    def mark(self, stage: Stage, at: float) -> None:
        """See :meth:`Stamps.mark`."""
        self._stamps.mark(stage, at)

    def merge(self, stamps: Stamps) -> None:
        """Add what a rank has stamped, if its clock is this process's."""
        self._stamps.chunks += stamps.chunks
        if not _HOST or stamps.host != _HOST:
            return
        for stage, at in stamps.at.items():
            self._stamps.mark(stage, at)

    def offsets(self) -> dict[Stage, float]:
        """Seconds from the queueing to each stage that is known, by time.

        A decode engine's registration may arrive before the request itself.
        """
        at = self._stamps.at.copy()
        queued = at[Stage.QUEUED]
        known = ((stage, moment - queued) for stage, moment in at.items())
        return dict(sorted(known, key=lambda one: one[1]))

    def spans(self, role: Role) -> Iterator[Span]:
        """The phases whose both ends are known, in order."""
        offsets = self.offsets()
        latest = offsets[Stage.QUEUED]
        start: float | None = latest
        for phase in PHASES[role]:
            reached = next((s for s in phase.until if s in offsets), None)
            if reached is None:
                start = None
                continue
            latest = max(latest, offsets[reached])
            if start is not None:
                yield Span(phase, start, latest)
            start = latest

    def durations(self, role: Role) -> dict[str, float]:
        """Seconds per phase; with what was waited for, where all phases are known."""
        spans = list(self.spans(role))
        found = {span.phase.name: span.end - span.start for span in spans}
        if len(spans) == len(PHASES[role]):
            for wait, name in WAITING.items():
                found[name] = sum(
                    span.end - span.start
                    for span in spans
                    if span.phase.waits_for is wait
                )
            found[TOTAL] = spans[-1].end - spans[0].start
        return found

    def described(self, role: Role) -> dict[str, object]:
        """What a trace says of it: times in seconds since the queueing."""
        return {
            "chunks": self._stamps.chunks,
            "queued_at": self.queued_at,
            "stages": {
                str(stage): round(seconds, 6)
                for stage, seconds in self.offsets().items()
            },
            "phases": [
                {
                    "name": span.phase.name,
                    "waits_for": str(span.phase.waits_for),
                    "start": round(span.start, 6),
                    "end": round(span.end, 6),
                }
                for span in self.spans(role)
            ],
        }
