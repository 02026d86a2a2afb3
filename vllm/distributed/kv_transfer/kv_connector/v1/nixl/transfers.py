# SPDX-License-Identifier: Apache-2.0
"""WRITEs and READs under way, each a sequence of bounded NIXL transfers."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .agent import Agent, AgentError, TransferState
from .handoff.actions import TransferSize
from .ids import AgentName, RegistrationId
from .peers import SETTLE_SECONDS
from .plan import Piece


@dataclass(frozen=True)
class TransferEnded:
    """All pieces of one WRITE or READ have ended.

    Attributes:
        chunk: which WRITE of the registration it was.
        failure: why it failed, if so.
        post_seconds: time spent in posting calls.
        period: when the first post began and the last one had ended; ``None`` if
            nothing was posted.
    """

    operation: str
    peer: AgentName
    registration_id: RegistrationId
    chunk: int
    size: TransferSize
    failure: str | None
    post_seconds: float
    period: tuple[float, float] | None

    @property
    def seconds(self) -> float:
        """From the first post to the last end."""
        return 0.0 if self.period is None else self.period[1] - self.period[0]


@dataclass
class _Job:
    operation: str
    peer: AgentName
    registration_id: RegistrationId
    chunk: int
    local: Any
    remote: Any
    pieces: deque[tuple[Piece, bytes]]
    handles: list[Any] = field(default_factory=list)
    posted: TransferSize = field(default_factory=TransferSize)
    failure: str | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    post_seconds: float = 0.0


class TransferPool:
    """Posts pieces in turn and watches their handles.

    Args:
        agent: the local NIXL agent.
        budget: seconds that one call of :meth:`advance` may spend in posting;
            a post in progress is not interrupted.
        window: pieces of one job that are under way at a time.
        settle: seconds that a failed WRITE is held to be under way after its last
            handle has ended. Its peer takes the end for proof, while bytes of a
            broken connection may still lie in the peer's sockets.
    """

    def __init__(
        self,
        agent: Agent,
        budget: float = 0.01,
        window: int = 4,
        settle: float = SETTLE_SECONDS,
    ) -> None:
        self._agent = agent
        self._budget = budget
        self._window = window
        self._settle = settle
        self._jobs: list[_Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def start(
        self,
        operation: str,
        peer: AgentName,
        registration_id: RegistrationId,
        chunk: int,
        local: Any,
        remote: Any,
        pieces: list[Piece],
        notification: Callable[[int, int, Piece], bytes],
    ) -> None:
        """Queue a ``WRITE`` or ``READ``.

        ``notification(seq, total, piece)`` gives what travels with each piece.
        """
        queue = deque(
            (piece, notification(seq, len(pieces), piece))
            for seq, piece in enumerate(pieces)
        )
        self._jobs.append(
            _Job(operation, peer, registration_id, chunk, local, remote, queue)
        )

    def advance(self) -> Iterator[TransferEnded]:
        """Check what is under way, post what may be; yields what has ended."""
        deadline = time.monotonic() + self._budget
        ended: list[TransferEnded] = []
        for job in list(self._jobs):
            self._check(job)
            self._post(job, deadline)
            if not job.handles and not job.pieces and self._is_settled(job):
                self._jobs.remove(job)
                ended.append(self._result(job))
        yield from ended

    def fail_peer(self, peer: AgentName, reason: str) -> None:
        """Post nothing more for a peer; what is posted ends by itself."""
        for job in self._jobs:
            if job.peer == peer:
                job.failure = job.failure or reason
                job.pieces.clear()

    def post_no_more(self) -> None:
        """End with what is posted; for the end of this process."""
        for job in self._jobs:
            if job.pieces:
                self._fail(job, "this engine is shutting down")

    def uses(self, peer: AgentName) -> bool:
        """Whether a transfer with ``peer`` has not ended."""
        return any(job.peer == peer for job in self._jobs)

    def _check(self, job: _Job) -> None:
        for handle in list(job.handles):
            try:
                state = self._agent.check(handle)
                failure = "NIXL reports a failed transfer"
            except AgentError as error:
                state, failure = TransferState.FAILED, str(error)
            if state is TransferState.RUNNING:
                continue
            job.handles.remove(handle)
            self._agent.release(handle)
            if state is TransferState.FAILED:
                self._fail(job, failure)

    def _post(self, job: _Job, deadline: float) -> None:
        while job.pieces and len(job.handles) < self._window:
            now = time.monotonic()
            if now > deadline:
                return
            job.started_at = job.started_at or now
            piece, notification = job.pieces.popleft()
            try:
                handle, state = self._agent.post(
                    job.operation,
                    job.local,
                    piece.local,
                    job.remote,
                    piece.remote,
                    notification,
                )
            except AgentError as error:
                self._fail(job, str(error))
                return
            finally:
                job.post_seconds += time.monotonic() - now
            job.posted += TransferSize(piece.bytes, piece.descriptors)
            if state is TransferState.RUNNING:
                job.handles.append(handle)
                continue
            self._agent.release(handle)
            if state is TransferState.FAILED:
                self._fail(job, "NIXL reports a failed transfer")
                return

    def _is_settled(self, job: _Job) -> bool:
        now = time.monotonic()
        job.ended_at = job.ended_at or now
        if job.failure is None or job.operation != "WRITE" or not job.started_at:
            return True
        return now - job.ended_at >= self._settle

    @staticmethod
    def _fail(job: _Job, reason: str) -> None:
        job.failure = job.failure or f"{job.operation} failed: {reason}"
        job.pieces.clear()

    @staticmethod
    def _result(job: _Job) -> TransferEnded:
        period = (job.started_at, job.ended_at) if job.started_at else None
        return TransferEnded(
            job.operation,
            job.peer,
            job.registration_id,
            job.chunk,
            job.posted if job.failure is None else TransferSize(),
            job.failure,
            job.post_seconds,
            period,
        )
