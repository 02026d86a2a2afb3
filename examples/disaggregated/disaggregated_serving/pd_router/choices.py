# SPDX-License-Identifier: Apache-2.0
"""Notes what an early and a late choice of the decode engine look like."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Mode, Role
from .errors import Reply
from .plan import Plan
from .workers import Lease, Registry, Worker

if TYPE_CHECKING:
    from .attempts import Attempt

logger = logging.getLogger("pd_router")


class ChoiceLog:
    """One JSON line for each attempt whose prompt was prefilled.

    Each has the decode engines' running legs, without the attempt's own, when it was
    dispatched (``early``) and when prefill had ended (``late``), with the engine that
    a choice at that moment takes; which one was really ``chosen``; and seconds from
    dispatch to the end of prefill, to decode's answer and to the end of that.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, mode: Mode, workers: Registry) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._mode = mode
        self._workers = workers

    def planner(
        self, inner: "Callable[[Attempt], Plan] | None"
    ) -> "Callable[[Attempt], Plan]":
        """Makes plans that note choices besides what ``inner``'s plans do."""

        def plan(attempt: "Attempt") -> Plan:
            return _NotingPlan(self, attempt, inner(attempt) if inner else Plan())

        return plan

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; a full disk costs the line, not the request."""
        try:
            self._file.write(json.dumps({"mode": str(self._mode), **line}) + "\n")
        except OSError as error:
            logger.warning("the choice log cannot be written: %s", error)

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def look(self, own: Lease | None) -> dict[str, Any]:
        """The decode engines' loads, without what ``own`` adds to one."""
        loads = {
            worker: worker.load
            - (own.cost if own is not None and worker is own.worker else 0.0)
            for worker in self._workers.healthy(Role.DECODE)
        }
        choice = min(loads, key=lambda w: (loads[w], w.last_picked), default=None)
        return {
            "choice": choice and str(choice.address),
            "loads": {str(worker.address): load for worker, load in loads.items()},
        }


class _NotingPlan(Plan):
    """Does what another plan does, and notes when it is told of what."""

    def __init__(self, log: ChoiceLog, attempt: "Attempt", inner: Plan) -> None:
        self._log = log
        self._attempt = attempt
        self._inner = inner
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._early = log.look(None)
        self._late: dict[str, Any] | None = None

    def prefer(self, candidates: Sequence[Worker]) -> Worker | None:
        """See :class:`Plan`, as for all others."""
        return self._inner.prefer(candidates)

    def prefill_params(self) -> Mapping[str, Any]:
        return self._inner.prefill_params()

    def prefilled(self, reply: Reply) -> None:
        self._note("prefilled")
        decode = self._attempt.decode
        own = None if decode is None else self._attempt.leases.get(decode)
        self._late = self._log.look(own)
        self._inner.prefilled(reply)

    def decode_params(self, worker: Worker) -> Mapping[str, Any]:
        return self._inner.decode_params(worker)

    def answered(self) -> None:
        self._note("answered")
        self._inner.answered()

    def finished(self, reply: Reply | None) -> None:
        self._note("finished")
        self._inner.finished(reply)

    def end(self) -> None:
        if self._late is not None:
            chosen = self._attempt.decode
            self._log.write(
                {
                    "transfer_id": self._attempt.transfer_id,
                    "chosen": chosen and str(chosen.address),
                    "early": self._early,
                    "late": self._late,
                    "seconds": self._seconds,
                }
            )
        self._inner.end()

    def _note(self, moment: str) -> None:
        self._seconds[moment] = time.monotonic() - self._began
