# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of transfers, under the base's metric names."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from .handoff.actions import FailureKind

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

_SERIES = (TRANSFER_SECONDS, POST_SECONDS, BYTES, DESCRIPTORS)
_FAILURES = (
    FAILED_TRANSFERS,
    FAILED_NOTIFICATIONS,
    FAILED_HANDSHAKES,
    EXPIRED,
    LATE_NOTIFICATIONS,
)


_HANDOFFS = {kind: f"{FAILED_HANDOFFS}_{kind.value}" for kind in FailureKind}


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
        keys = (*_SERIES, *_FAILURES, *_HANDOFFS.values(), QUARANTINED)
        self.data = {key: [] for key in keys}

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
        self.data[_HANDOFFS[kind]].append(1)

    def quarantine(self, blocks: int) -> None:
        """So many blocks are held until a peer is proven unable to write."""
        self.data[QUARANTINED] = [blocks]

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
        count = len(self.data[TRANSFER_SECONDS])
        transport = (FAILED_TRANSFERS, FAILED_NOTIFICATIONS, FAILED_HANDSHAKES)
        summary: dict[str, int | float] = {"Num successful transfers": count}
        seconds = _array(self.data[TRANSFER_SECONDS])
        posts = _array(self.data[POST_SECONDS])
        mib = _array(self.data[BYTES]) / 2**20
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
                    _array(self.data[DESCRIPTORS]).mean(), count
                ),
                "Num failed transfers": sum(len(self.data[key]) for key in transport),
                "Num KV expired reqs": len(self.data[EXPIRED]),
                "Num notifs after expiry": len(self.data[LATE_NOTIFICATIONS]),
                "Num failed hand-offs": sum(
                    len(self.data[key]) for key in _HANDOFFS.values()
                ),
            }
        )
        return summary


class StatsCollector:
    """Stats that one thread fills and another takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = NixlKVConnectorStats()
        self._quarantined = 0

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

    def quarantine(self, blocks: int) -> None:
        """Note the number of quarantined blocks, if it is another than before."""
        with self._lock:
            if blocks != self._quarantined:
                self._quarantined = blocks
                self._stats.quarantine(blocks)

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


class NixlPromMetrics(KVConnectorPromMetrics):
    """The ``vllm:nixl_*`` metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        times = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75]
        times += [1.0, 5.0]
        self._histograms = {
            TRANSFER_SECONDS: self._histogram(
                "vllm:nixl_xfer_time_seconds",
                "Duration of a NIXL KV cache transfer from first post to last end.",
                times[1:],
            ),
            POST_SECONDS: self._histogram(
                "vllm:nixl_post_time_seconds",
                "Time spent in posting a NIXL KV cache transfer.",
                times,
            ),
            BYTES: self._histogram(
                "vllm:nixl_bytes_transferred",
                "Bytes moved per NIXL KV cache transfer.",
                [2.0**power for power in range(11, 35, 2)],
            ),
            DESCRIPTORS: self._histogram(
                "vllm:nixl_num_descriptors",
                "Descriptors per NIXL KV cache transfer after merging.",
                [10, 20, 30, 50, 75, 100, 200, 400, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4],
            ),
        }
        self._counters = (
            (
                self._counter(
                    "vllm:nixl_num_failed_transfers",
                    "Failed NIXL KV cache transfers, handshakes and notifications.",
                ),
                (FAILED_TRANSFERS, FAILED_HANDSHAKES, FAILED_NOTIFICATIONS),
            ),
            (
                self._counter(
                    "vllm:nixl_num_failed_notifications",
                    "Failed NIXL notifications, which count as transfers too.",
                ),
                (FAILED_NOTIFICATIONS,),
            ),
            (
                self._counter(
                    "vllm:nixl_num_kv_expired_reqs",
                    "Requests whose computed KV no decode engine took in time; "
                    "counted on the prefill engine.",
                ),
                (EXPIRED,),
            ),
            (
                self._counter(
                    "vllm:nixl_num_notifications_after_expiry",
                    "Reads that ended after the prefill engine had let go of the KV; "
                    "their result was discarded.",
                ),
                (LATE_NOTIFICATIONS,),
            ),
        )

        failed = self._counter_cls(
            name="vllm:nixl_num_failed_handoffs",
            documentation="Decode requests that did not get their KV, by cause.",
            labelnames=[*labelnames, "kind"],
        )
        quarantined = self._gauge_cls(
            name="vllm:nixl_quarantined_blocks",
            documentation="KV cache blocks held until a lost peer is proven unable to "
            "write into them.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._failed_handoffs = {
            (engine, kind): failed.labels(*labels, kind.value)
            for engine, labels in self.per_engine_labelvalues.items()
            for kind in FailureKind
        }
        self._quarantined: dict[int, Any] = create_metric_per_engine(
            quarantined, self.per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations for an engine."""
        data: dict[str, list[float]] = defaultdict(list, transfer_stats_data)
        for key, histogram in self._histograms.items():
            for value in data[key]:
                histogram[engine_idx].observe(value)
        for counter, kinds in self._counters:
            count = sum(len(data[kind]) for kind in kinds)
            if count:
                counter[engine_idx].inc(count)
        for kind, key in _HANDOFFS.items():
            if data[key]:
                self._failed_handoffs[engine_idx, kind].inc(len(data[key]))
        if data[QUARANTINED]:
            self._quarantined[engine_idx].set(data[QUARANTINED][-1])

    def _histogram(
        self, name: str, documentation: str, buckets: list[float]
    ) -> dict[int, Any]:
        metric = self._histogram_cls(
            name=name,
            documentation=documentation,
            buckets=buckets,
            labelnames=self._labelnames,
        )
        made: dict[int, Any] = create_metric_per_engine(
            metric, self.per_engine_labelvalues
        )
        return made

    def _counter(self, name: str, documentation: str) -> dict[int, Any]:
        metric = self._counter_cls(
            name=name, documentation=documentation, labelnames=self._labelnames
        )
        made: dict[int, Any] = create_metric_per_engine(
            metric, self.per_engine_labelvalues
        )
        return made
