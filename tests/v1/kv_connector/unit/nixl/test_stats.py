# SPDX-License-Identifier: Apache-2.0
"""Counters, histograms and their way to Prometheus."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as names
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.prom import NixlPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    StatsCollector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import Role


def _some() -> NixlKVConnectorStats:
    stats = NixlKVConnectorStats()
    stats.transfer(0.2, 0.05, 2 << 20, 30)
    stats.transfer(0.4, 0.15, 4 << 20, 10)
    stats.failure(names.FAILED_HANDSHAKES)
    stats.failure(names.EXPIRED)
    stats.receive_failed(FailureKind.TIMEOUT)
    stats.held(names.QUARANTINED, 7)
    stats.held(names.QUEUED_TRANSFERS, 3)
    stats.more(names.DROPPED["evicted"], 2)
    stats.more(names.STALLED_SECONDS, 1.5)
    stats.handoff(Role.SENDER, {"queue": 0.5, "prefill": 2.0})
    stats.handoff(Role.RECEIVER, {"queue": 0.25})
    return stats


def test_an_interval_is_summed_up() -> None:
    summary = _some().reduce()
    assert summary["Num successful transfers"] == 2
    assert summary["Avg xfer time (ms)"] == 300
    assert summary["Avg MB per transfer"] == 3
    assert summary["Throughput (MB/s)"] == 10
    assert summary["Avg number of descriptors"] == 20
    assert summary["Num failed transfers"] == 1
    assert summary["Num KV expired reqs"] == 1
    assert summary["Num failed hand-offs"] == 1


def test_nothing_is_summed_up_without_a_division_by_zero() -> None:
    stats = NixlKVConnectorStats()
    assert stats.is_empty()
    assert set(stats.reduce().values()) == {0}


def test_ranks_add_up_and_survive_serialisation() -> None:
    data = json.loads(json.dumps(_some().data))
    both = NixlKVConnectorStats(data).aggregate(_some())
    assert both.reduce()["Num successful transfers"] == 4
    assert not both.is_empty()


def test_a_collection_takes_what_there_was() -> None:
    collector = StatsCollector()
    assert collector.take() is None
    collector.transfer(0.1, 0.1, 10, 1)
    collector.failure(names.FAILED_TRANSFERS)
    collector.receive_failed(FailureKind.REFUSED)
    taken = collector.take()
    assert taken is not None
    assert taken.reduce()["Num successful transfers"] == 1
    assert collector.take() is None


def test_the_quarantine_is_told_when_it_changes() -> None:
    collector = StatsCollector()
    collector.held(names.QUARANTINED, 0)
    assert collector.take() is None
    collector.held(names.QUARANTINED, 3)
    assert collector.take() is not None
    collector.held(names.QUARANTINED, 3)
    assert collector.take() is None
    collector.held(names.QUARANTINED, 0)
    taken = collector.take()
    assert taken is not None
    assert taken.data[names.QUARANTINED] == [0]


@pytest.fixture
def metrics() -> Iterator[NixlPromMetrics]:
    before = set(REGISTRY._collector_to_names)
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlPushConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"backends": ["UCX", "LIBFABRIC"]},
        )
    )
    types: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    yield NixlPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


LABELS = {"model_name": "m", "engine": "0"}


def test_metrics_have_the_bases_names(metrics: NixlPromMetrics) -> None:
    metrics.observe(_some().data)
    metrics.observe(_some().data)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:nixl_{name}", {**LABELS, **labels})

    assert value("xfer_time_seconds_count") == 4
    assert value("xfer_time_seconds_sum") == pytest.approx(1.2)
    assert value("post_time_seconds_count") == 4
    assert value("bytes_transferred_sum") == 12 << 20
    assert value("num_descriptors_sum") == 80
    assert value("num_failed_transfers_total") == 2
    assert value("num_failed_notifications_total") == 0
    assert value("num_kv_expired_reqs_total") == 2
    assert value("num_failed_handoffs_total", kind="timeout") == 2
    assert value("num_failed_handoffs_total", kind="refused") == 0
    assert value("quarantined_blocks") == 7
    assert value("num_retained_dropped_total", reason="evicted") == 4
    assert value("num_retained_dropped_total", reason="expired") == 0
    assert value("transfer_thread_stalled_seconds_total") == 3.0
    assert value("transfer_queue_depth") == 3
    assert value("handoff_queue_seconds_count", role="sender") == 2
    assert value("handoff_queue_seconds_sum", role="sender") == 1.0
    assert value("handoff_queue_seconds_sum", role="receiver") == 0.5
    assert value("handoff_prefill_seconds_sum", role="sender") == 4.0
    # No empty series of roles that this engine does not have.
    assert value("handoff_queue_seconds_count", role="reader") is None


@pytest.mark.usefixtures("metrics")
def test_the_backends_are_named_in_a_metric() -> None:
    described = {"connector": "NixlPushConnector", "backends": "UCX,LIBFABRIC"}
    assert REGISTRY.get_sample_value("vllm:nixl_info", {**LABELS, **described}) == 1


def test_stats_of_an_older_shape_are_observed(metrics: NixlPromMetrics) -> None:
    metrics.observe({names.TRANSFER_SECONDS: [0.1]})
    sample = REGISTRY.get_sample_value("vllm:nixl_xfer_time_seconds_count", LABELS)
    assert sample == 1


def test_stats_of_an_older_shape_are_summed_up() -> None:
    summary = NixlKVConnectorStats({names.TRANSFER_SECONDS: [0.1]}).reduce()
    assert summary["Num successful transfers"] == 1
    assert summary["Avg xfer time (ms)"] == 100


HANDOFF = names.HANDOFF_SECONDS[Role.SENDER, "queue"]


@pytest.mark.parametrize(
    ("data", "engine"),
    [
        ({HANDOFF: ["soon"]}, 0),
        ({HANDOFF: [None]}, 0),
        ({HANDOFF: 1.0}, 0),
        ({names.QUARANTINED: None, names.QUEUED_TRANSFERS: ["many"]}, 0),
        ({HANDOFF: [1.0]}, 7),
        (None, 0),
    ],
)
def test_no_statistics_end_the_loop_that_delivers_answers(
    metrics: NixlPromMetrics, data: Any, engine: int
) -> None:
    metrics.observe(data, engine)
    metrics.observe({HANDOFF: [1.0], "of a later version": [1.0]})
    labels = {**LABELS, "role": "sender"}
    count = REGISTRY.get_sample_value("vllm:nixl_handoff_queue_seconds_count", labels)
    assert count == 1
