# SPDX-License-Identifier: Apache-2.0
"""The ``vllm:nixl_*`` metrics; those of the base under its names."""

from collections import defaultdict
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    PromMetric,
    PromMetricT,
)
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine

from . import stats as names
from .config import ConnectorConfig
from .handoff.actions import FailureKind
from .prom_handoff import HandoffHistograms

logger = init_logger(__name__)


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
            names.TRANSFER_SECONDS: self._histogram(
                "vllm:nixl_xfer_time_seconds",
                "Duration of a NIXL KV cache transfer from first post to last end.",
                times[1:],
            ),
            names.POST_SECONDS: self._histogram(
                "vllm:nixl_post_time_seconds",
                "Time spent in posting a NIXL KV cache transfer.",
                times,
            ),
            names.BYTES: self._histogram(
                "vllm:nixl_bytes_transferred",
                "Bytes moved per NIXL KV cache transfer.",
                [2.0**power for power in range(11, 35, 2)],
            ),
            names.DESCRIPTORS: self._histogram(
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
                (
                    names.FAILED_TRANSFERS,
                    names.FAILED_HANDSHAKES,
                    names.FAILED_NOTIFICATIONS,
                ),
            ),
            (
                self._counter(
                    "vllm:nixl_num_failed_notifications",
                    "Failed NIXL notifications, which count as transfers too.",
                ),
                (names.FAILED_NOTIFICATIONS,),
            ),
            (
                self._counter(
                    "vllm:nixl_num_kv_expired_reqs",
                    "Requests whose computed KV no decode engine took in time; "
                    "counted on the prefill engine.",
                ),
                (names.EXPIRED,),
            ),
            (
                self._counter(
                    "vllm:nixl_num_notifications_after_expiry",
                    "Reads that ended after the prefill engine had let go of the KV; "
                    "their result was discarded.",
                ),
                (names.LATE_NOTIFICATIONS,),
            ),
        )

        failed = self._counter_cls(
            name="vllm:nixl_num_failed_handoffs",
            documentation="Decode requests that did not get their KV, by cause.",
            labelnames=[*labelnames, "kind"],
        )
        reuses = self._counter_cls(
            name="vllm:nixl_num_reuses",
            documentation="Prompts that continue a conversation of which another "
            "engine may keep KV, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )
        self._reuses = {
            (engine, outcome): reuses.labels(*labels, outcome)
            for engine, labels in self.per_engine_labelvalues.items()
            for outcome in names.REUSE_OUTCOMES
        }
        dropped = self._counter_cls(
            name="vllm:nixl_num_retained_dropped",
            documentation="Kept answers that went before anybody released them: for "
            "want of room or at the end of their life.",
            labelnames=[*labelnames, "reason"],
        )
        self._dropped = {
            (engine, reason): dropped.labels(*labels, reason)
            for engine, labels in self.per_engine_labelvalues.items()
            for reason in names.RETAINED_ENDS
        }
        self._stalled_seconds = self._counter(
            "vllm:nixl_transfer_thread_stalled_seconds",
            "Time for which a transfer thread has not come back from a step, beyond "
            "the first two seconds, over all ranks.",
        )
        self._reused_tokens = self._counter(
            "vllm:nixl_reused_tokens",
            "Prompt tokens whose KV was read back from the engine that keeps it.",
        )
        self._gauges = {
            names.QUARANTINED: self._gauge(
                "vllm:nixl_quarantined_blocks",
                "KV cache blocks held until a lost peer is proven unable to write "
                "into them.",
            ),
            names.RETAINED: self._gauge(
                "vllm:nixl_retained_blocks",
                "References on KV cache blocks that are kept for later turns.",
            ),
            names.QUEUED_TRANSFERS: self._gauge(
                "vllm:nixl_transfer_queue_depth",
                "NIXL KV cache transfers that have not ended: those under way, those "
                "not posted yet, and KV whose computation is awaited before a post.",
            ),
        }
        self._handoffs = HandoffHistograms(
            self._histogram_cls, labelnames, per_engine_labelvalues
        )
        self._tell_backends(vllm_config.kv_transfer_config)
        self._failed_handoffs = {
            (engine, kind): failed.labels(*labels, kind.value)
            for engine, labels in self.per_engine_labelvalues.items()
            for kind in FailureKind
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations for an engine.

        The caller is the loop that delivers every answer, and an exception ends it.
        """
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception:
            logger.exception("Statistics of engine %s are left out", engine_idx)

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        data: dict[str, list[float]] = defaultdict(list, transfer_stats_data)
        for key, histogram in self._histograms.items():
            for value in data[key]:
                histogram[engine_idx].observe(value)
        for counter, kinds in self._counters:
            count = sum(len(data[kind]) for kind in kinds)
            if count:
                counter[engine_idx].inc(count)
        for kind, key in names.HANDOFFS.items():
            if data[key]:
                self._failed_handoffs[engine_idx, kind].inc(len(data[key]))
        for outcome, key in names.REUSES.items():
            self._reuses[engine_idx, outcome].inc(sum(data[key]))
        for reason, key in names.DROPPED.items():
            self._dropped[engine_idx, reason].inc(sum(data[key]))
        self._reused_tokens[engine_idx].inc(sum(data[names.REUSED_TOKENS]))
        self._stalled_seconds[engine_idx].inc(sum(data[names.STALLED_SECONDS]))
        for key, gauge in self._gauges.items():
            if data[key]:
                gauge[engine_idx].set(data[key][-1])
        self._handoffs.observe(data, engine_idx)

    def _tell_backends(self, transfer_config: Any) -> None:
        if transfer_config is None:
            return
        extra = transfer_config.kv_connector_extra_config
        info = self._gauge_cls(
            name="vllm:nixl_info",
            documentation="Always 1; the labels tell the connector and its NIXL "
            "backends, in order of preference.",
            multiprocess_mode="mostrecent",
            labelnames=[*self._labelnames, "connector", "backends"],
        )
        described = (
            str(transfer_config.kv_connector),
            ",".join(ConnectorConfig.parse(extra).backends),
        )
        for labels in self.per_engine_labelvalues.values():
            info.labels(*labels, *described).set(1)

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

    def _gauge(self, name: str, documentation: str) -> dict[int, Any]:
        metric = self._gauge_cls(
            name=name,
            documentation=documentation,
            multiprocess_mode="mostrecent",
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
