# SPDX-License-Identifier: Apache-2.0
"""What the router counts, in a registry of its own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .breaker import BreakerState
from .config import Mode
from .errors import Cause
from .workers import Registry

_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class Metrics:
    """The counters of one router; every series carries the router's mode."""

    def __init__(self, mode: Mode, workers: Registry) -> None:
        self.registry = CollectorRegistry()
        self._mode = str(mode)
        self._requests = Counter(
            "pd_router_requests",
            "Requests by how they ended",
            ["mode", "endpoint", "outcome"],
            registry=self.registry,
        )
        self._legs = Histogram(
            "pd_router_leg_seconds",
            "Length of a leg; a decode leg ends with its last byte",
            ["mode", "leg", "result"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "pd_router_time_to_first_event_seconds",
            "From the request's arrival to the first event of its stream",
            ["mode"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._retries = Counter(
            "pd_router_retries",
            "Further attempts by what made them necessary",
            ["mode", "cause"],
            registry=self.registry,
        )
        self._failures = Counter(
            "pd_router_handoff_failures",
            "Failed hand-offs by cause, retried ones included",
            ["mode", "cause"],
            registry=self.registry,
        )
        self._local = Counter(
            "pd_router_local_prefills",
            "Requests whose prompt the decode engine computed itself",
            ["mode", "reason"],
            registry=self.registry,
        )
        self._rebinds = Counter(
            "pd_router_rebinds",
            "Hand-offs that two decode engines were asked for, by which one answered",
            ["mode", "reason", "winner"],
            registry=self.registry,
        )
        self.registry.register(_WorkerCollector(workers))

    def request(self, endpoint: str, outcome: str) -> None:
        """Count a finished request."""
        self._requests.labels(self._mode, endpoint, outcome).inc()

    def leg(self, leg: str, result: str, seconds: float) -> None:
        """Note the length of a leg, in seconds."""
        self._legs.labels(self._mode, leg, result).observe(seconds)

    def first_event(self, seconds: float) -> None:
        """Note a stream's time to first event, in seconds."""
        self._ttft.labels(self._mode).observe(seconds)

    def retry(self, cause: Cause) -> None:
        """Count a further attempt."""
        self._retries.labels(self._mode, str(cause)).inc()

    def handoff_failure(self, cause: Cause) -> None:
        """Count a failed attempt."""
        self._failures.labels(self._mode, str(cause)).inc()

    def local_prefill(self, reason: str) -> None:
        """Count a request that was served without a hand-off."""
        self._local.labels(self._mode, reason).inc()

    def rebind(self, reason: str, winner: str) -> None:
        """Count a hand-off that a second decode engine was asked for."""
        self._rebinds.labels(self._mode, reason, winner).inc()

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class _WorkerCollector(Collector):
    """Reads the workers at scrape time, so removed ones leave no series."""

    def __init__(self, workers: Registry) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        outstanding = GaugeMetricFamily(
            "pd_router_worker_outstanding", "Running legs", labels=labels
        )
        healthy = GaugeMetricFamily(
            "pd_router_worker_healthy", "1 if it can be chosen", labels=labels
        )
        picked = CounterMetricFamily(
            "pd_router_worker_picked", "Legs given to the worker", labels=labels
        )
        breaker = GaugeMetricFamily(
            "pd_router_worker_breaker",
            "1 for the state that the worker's circuit breaker is in",
            labels=[*labels, "state"],
        )
        opened = CounterMetricFamily(
            "pd_router_worker_breaker_opened",
            "Times that the worker's circuit breaker has opened",
            labels=labels,
        )
        for worker in self._workers:
            values = [str(worker.role), str(worker.address)]
            outstanding.add_metric(values, worker.outstanding)
            healthy.add_metric(values, float(worker.healthy))
            picked.add_metric(values, worker.picked)
            now = worker.breaker.state
            for state in BreakerState:
                breaker.add_metric([*values, str(state)], float(state is now))
            opened.add_metric(values, worker.breaker.opened)
        yield from (outstanding, healthy, picked, breaker, opened)
