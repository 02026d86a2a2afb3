# SPDX-License-Identifier: Apache-2.0
"""What workers and schedulers observe, between two collections."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from .handoff.actions import FailureKind
from .timeline import Role, durations

TRANSFER_SECONDS = "transfer_duration"
POST_SECONDS = "post_duration"
BYTES = "bytes_transferred"
DESCRIPTORS = "num_descriptors"
FAILED_TRANSFERS = "num_failed_transfers"
FAILED_NOTIFICATIONS = "num_failed_notifications"
FAILED_HANDSHAKES = "num_failed_handshakes"
EXPIRED = "num_kv_expired_reqs"
LATE_NOTIFICATIONS = "num_notifications_after_expiry"

FAILED_HANDOFFS = "num_failed_handoffs"
QUARANTINED = "quarantined_blocks"
RETAINED = "retained_blocks"
REUSED_TOKENS = "reused_tokens"
STALLED_SECONDS = "transfer_thread_stalled_seconds"
QUEUED_TRANSFERS = "queued_transfers"

REUSE_OUTCOMES = ("read", "recomputed", "missed")
"""What becomes of a prompt of which another engine may keep a part."""

RETAINED_ENDS = ("evicted", "expired")
"""Why kept KV goes that nobody has released."""

_SERIES = (TRANSFER_SECONDS, POST_SECONDS, BYTES, DESCRIPTORS)
_FAILURES = (
    FAILED_TRANSFERS,
    FAILED_NOTIFICATIONS,
    FAILED_HANDSHAKES,
    EXPIRED,
    LATE_NOTIFICATIONS,
)


HANDOFFS = {kind: f"{FAILED_HANDOFFS}_{kind.value}" for kind in FailureKind}
REUSES = {outcome: f"num_reuses_{outcome}" for outcome in REUSE_OUTCOMES}
DROPPED = {reason: f"num_retained_dropped_{reason}" for reason in RETAINED_ENDS}
GAUGES = (QUARANTINED, RETAINED, QUEUED_TRANSFERS)
HANDOFF_SECONDS = {
    (role, name): f"handoff_seconds_{role.value}_{name}"
    for role in Role
    for name in durations(role)
}
"""Series that exist only in intervals in which a hand-off has ended."""


class NixlKVConnectorStats(KVConnectorStats):
    """What one worker or scheduler has observed since the last collection.

    ``data`` maps each series to its observations, and each kind of failure to a
    list with one entry per occurrence, so that it survives serialisation and
    sums over ranks.
    """

    data: dict[str, list[float]]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all observations."""
        self.data = {
            key: []
            for key in (
                *_SERIES,
                *_FAILURES,
                *HANDOFFS.values(),
                *REUSES.values(),
                *DROPPED.values(),
                REUSED_TOKENS,
                STALLED_SECONDS,
                *GAUGES,
            )
        }

    def transfer(
        self, seconds: float, post_seconds: float, size: int, descriptors: int
    ) -> None:
        """One WRITE or READ of ``size`` bytes has succeeded."""
        for key, value in zip(
            _SERIES, (seconds, post_seconds, size, descriptors), strict=True
        ):
            self.data[key].append(value)

    def failure(self, kind: str) -> None:
        """One failure of ``kind``, a key of ``data``."""
        self.data[kind].append(1)

    def receive_failed(self, kind: FailureKind) -> None:
        """A decode request did not get its KV."""
        self.data[HANDOFFS[kind]].append(1)

    def reused(self, outcomes: dict[str, int], tokens: int) -> None:
        """So many prompts had each outcome, with so many tokens read in all."""
        for outcome, count in outcomes.items():
            if count:
                self.data[REUSES[outcome]].append(count)
        if tokens:
            self.data[REUSED_TOKENS].append(tokens)

    def more(self, key: str, amount: float) -> None:
        """So much more of what ``key`` names."""
        if amount:
            self.data[key].append(amount)

    def handoff(self, role: Role, seconds: Mapping[str, float]) -> None:
        """A hand-off has ended; ``seconds`` by name, as in :func:`.durations`."""
        for name, value in seconds.items():
            self.data.setdefault(HANDOFF_SECONDS[role, name], []).append(value)

    def held(self, key: str, count: int) -> None:
        """So many blocks, or transfers, are held for the reason in ``key``."""
        self.data[key] = [count]

    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's observations."""
        for key, values in other.data.items():
            self.data.setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A summary of the interval for the log; times in ms, sizes in MiB."""
        # Stats may come from an engine of another version.
        data = defaultdict(list, self.data)
        count = len(data[TRANSFER_SECONDS])
        transport = (FAILED_TRANSFERS, FAILED_NOTIFICATIONS, FAILED_HANDSHAKES)
        summary: dict[str, int | float] = {"Num successful transfers": count}
        seconds = _array(data[TRANSFER_SECONDS])
        posts = _array(data[POST_SECONDS])
        mib = _array(data[BYTES]) / 2**20
        total = float(seconds.sum())
        summary.update(
            {
                "Avg xfer time (ms)": _round(seconds.mean() * 1e3, count),
                "P90 xfer time (ms)": _round(np.percentile(seconds, 90) * 1e3, count),
                "Avg post time (ms)": _round(posts.mean() * 1e3, count),
                "P90 post time (ms)": _round(np.percentile(posts, 90) * 1e3, count),
                "Avg MB per transfer": _round(mib.mean(), count),
                "Throughput (MB/s)": _round(mib.sum() / total if total else 0, count),
                "Avg number of descriptors": _round(
                    _array(data[DESCRIPTORS]).mean(), count
                ),
                "Num failed transfers": sum(len(data[key]) for key in transport),
                "Num KV expired reqs": len(data[EXPIRED]),
                "Num notifs after expiry": len(data[LATE_NOTIFICATIONS]),
                "Num failed hand-offs": sum(
                    len(data[key]) for key in HANDOFFS.values()
                ),
            }
        )
        return summary


class StatsCollector:
    """Stats that one thread fills and another takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = NixlKVConnectorStats()
        self._held = dict.fromkeys(GAUGES, 0)

    def transfer(
        self, seconds: float, post_seconds: float, size: int, descriptors: int
    ) -> None:
        """See :meth:`NixlKVConnectorStats.transfer`."""
        with self._lock:
            self._stats.transfer(seconds, post_seconds, size, descriptors)

    def failure(self, kind: str) -> None:
        """See :meth:`NixlKVConnectorStats.failure`."""
        with self._lock:
            self._stats.failure(kind)

    def receive_failed(self, kind: FailureKind) -> None:
        """See :meth:`NixlKVConnectorStats.receive_failed`."""
        with self._lock:
            self._stats.receive_failed(kind)

    def reused(self, outcomes: dict[str, int], tokens: int) -> None:
        """See :meth:`NixlKVConnectorStats.reused`."""
        with self._lock:
            self._stats.reused(outcomes, tokens)

    def more(self, key: str, amount: float) -> None:
        """See :meth:`NixlKVConnectorStats.more`."""
        with self._lock:
            self._stats.more(key, amount)

    def handoff(self, role: Role, seconds: Mapping[str, float]) -> None:
        """See :meth:`NixlKVConnectorStats.handoff`."""
        with self._lock:
            self._stats.handoff(role, seconds)

    def held(self, key: str, count: int) -> None:
        """Note how many are held, if it is another number than before."""
        with self._lock:
            if count != self._held[key]:
                self._held[key] = count
                self._stats.held(key, count)

    def take(self) -> NixlKVConnectorStats | None:
        """What was observed since the last call, if anything."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, NixlKVConnectorStats()
            return taken


def _array(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(values or [0.0], dtype=np.float64)


def _round(value: Any, count: int) -> float:
    return round(float(value), 3) if count else 0
