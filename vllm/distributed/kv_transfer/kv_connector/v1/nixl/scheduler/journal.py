# SPDX-License-Identifier: Apache-2.0
"""Where finished hand-offs are told: to the histograms and to the trace."""

from collections.abc import Container

from ..handoff.actions import CloseReason
from ..ids import EngineId, Mode, RequestId
from ..stats import EXPIRED, StatsCollector
from ..timeline import Role, Stage
from ..timeline_trace import TraceFile
from .records import HandoffRecord

_HANDED_OFF = ("served", "received", "read")
"""Outcomes of hand-offs whose durations mean something; others end by timers."""


class Journal:
    """Takes each record once, and tells it when its timeline is complete.

    A record of KV that has come waits for the step in which its request runs.

    Args:
        trace: where each is written too, if anywhere.
    """

    def __init__(
        self,
        engine_id: EngineId,
        mode: Mode,
        stats: StatsCollector,
        trace: TraceFile | None,
    ) -> None:
        self._engine_id = engine_id
        self._mode = mode
        self._stats = stats
        self._trace = trace
        self._resuming: dict[RequestId, HandoffRecord] = {}

    def added(self, record: HandoffRecord) -> None:
        """A hand-off has ended for this side."""
        if record.role == Role.SENDER or record.outcome not in _HANDED_OFF:
            self._tell(record)
        else:
            self._resuming[record.request_id] = record

    def scheduled(self, requests: Container[str], now: float) -> None:
        """A step runs these requests."""
        if not self._resuming:
            return
        for request_id in [r for r in self._resuming if r in requests]:
            record = self._resuming.pop(request_id)
            if record.timeline is not None:
                record.timeline.mark(Stage.FIRST_STEP, now)
            self._tell(record)

    def finished(self, request_id: RequestId) -> None:
        """The request has ended, whether or not it ever ran."""
        record = self._resuming.pop(request_id, None)
        if record is not None:
            self._tell(record)

    def close(self) -> None:
        """Tell what is left, and close the trace."""
        for request_id in list(self._resuming):
            self.finished(request_id)
        if self._trace is not None:
            self._trace.close()

    def _tell(self, record: HandoffRecord) -> None:
        if (record.role, record.outcome) == (Role.SENDER, CloseReason.EXPIRED):
            self._stats.failure(EXPIRED)
        if record.timeline is not None and record.outcome in _HANDED_OFF:
            role = Role(record.role)
            self._stats.handoff(role, record.timeline.durations(role))
        if self._trace is not None:
            self._trace.put(
                {
                    "engine_id": self._engine_id,
                    "mode": str(self._mode.value),
                    **record.described(),
                }
            )
