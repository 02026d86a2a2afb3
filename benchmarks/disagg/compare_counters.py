# SPDX-License-Identifier: Apache-2.0
"""Reads from outside what an engine does: the probe, its metrics, its processes."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench_requests import TurnError
from compare_probe.engine_probe import (
    BLOCK_SECONDS,
    BLOCKS_USED,
    BUCKETS,
    FIELDS,
    FORWARD_CPU,
    FORWARD_STEPS,
    FORWARD_WALL,
    HISTOGRAM,
    SCHEDULER_CPU,
    USED_SINCE,
    bucket_end,
)
from pd_processes import group_members

_SAMPLE = re.compile(r"^(?P<name>vllm:\w+)(?:\{[^}]*\})? (?P<value>\S+)$")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Counters:
    """What the probe counted in all processes of an engine; times in seconds.

    Attributes:
        forward_cpu: thread time that the connector's hooks took of the forward
            thread.
        forward_wall: the same by the clock.
        forward_steps: steps in which they were called.
        scheduler_cpu: thread time that its hooks took of the scheduler.
        block_seconds: blocks in use, added up over time.
        blocks_used: blocks in use now.
        steps: how many steps took at most so much thread time, by bucket.
    """

    forward_cpu: float
    forward_wall: float
    forward_steps: float
    scheduler_cpu: float
    block_seconds: float
    blocks_used: float
    steps: tuple[float, ...]

    def since(self, earlier: Counters) -> Counters:
        """What was added since then."""
        return Counters(
            self.forward_cpu - earlier.forward_cpu,
            self.forward_wall - earlier.forward_wall,
            self.forward_steps - earlier.forward_steps,
            self.scheduler_cpu - earlier.scheduler_cpu,
            self.block_seconds - earlier.block_seconds,
            self.blocks_used,
            tuple(a - b for a, b in zip(self.steps, earlier.steps, strict=True)),
        )

    def step_quantile(self, share: float) -> float | None:
        """Thread time that so large a share of the steps did not exceed."""
        wanted, seen = share * sum(self.steps), 0.0
        for place, count in enumerate(self.steps):
            seen += count
            if count and seen >= wanted:
                return bucket_end(place)
        return None


def counters(folder: Path, engine: str) -> Counters:
    """Add up the counters of an engine's processes."""
    totals = [0.0] * FIELDS
    for path in folder.glob(f"{engine}-*.counters"):
        data = path.read_bytes()
        if len(data) != 8 * FIELDS:
            continue
        values = memoryview(data).cast("d")
        for place, value in enumerate(values):
            totals[place] += value
        if values[USED_SINCE]:
            held = time.monotonic() - values[USED_SINCE]
            totals[BLOCK_SECONDS] += values[BLOCKS_USED] * held
    return Counters(
        totals[FORWARD_CPU],
        totals[FORWARD_WALL],
        totals[FORWARD_STEPS],
        totals[SCHEDULER_CPU],
        totals[BLOCK_SECONDS],
        totals[BLOCKS_USED],
        tuple(totals[HISTOGRAM : HISTOGRAM + BUCKETS]),
    )


def events(folder: Path, engine: str) -> list[dict[str, Any]]:
    """What the probe wrote down in an engine's processes."""
    found = []
    for path in sorted(folder.glob(f"{engine}-*.events")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [json.loads(line) for line in lines]
    return found


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds of an engine's processes.

    Attributes:
        total: of all threads of all processes.
        forward: of the forward thread, with the model's computation.
        worker_rest: of the worker's other threads.
    """

    total: float
    forward: float
    worker_rest: float

    def since(self, earlier: CpuTimes) -> CpuTimes:
        """What was added since then."""
        return CpuTimes(
            self.total - earlier.total,
            self.forward - earlier.forward,
            self.worker_rest - earlier.worker_rest,
        )


def cpu_times(group: int) -> CpuTimes:
    """The CPU times of a process group's live processes."""
    total = forward = worker_rest = 0.0
    for pid in group_members(group):
        process = Path("/proc", str(pid))
        seconds = _stat_seconds(process / "stat")
        total += seconds
        if _is_worker(process):
            main = _stat_seconds(process / "task" / str(pid) / "stat")
            forward += main
            worker_rest += seconds - main
    return CpuTimes(total, forward, worker_rest)


def _stat_seconds(path: Path) -> float:
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _is_worker(process: Path) -> bool:
    try:
        return b"VLLM::Worker" in (process / "cmdline").read_bytes()
    except OSError:
        return False


METRICS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "external_queries": "vllm:external_prefix_cache_queries_total",
    "external_hits": "vllm:external_prefix_cache_hits_total",
    "transfers": "vllm:nixl_bytes_transferred_count",
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "descriptors": "vllm:nixl_num_descriptors_sum",
    "failed_transfers": "vllm:nixl_num_failed_transfers_total",
    "expired": "vllm:nixl_num_kv_expired_reqs_total",
    "generated": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The engine's own counters, by our short names; what it lacks is 0.

    Raises:
        TurnError: it does not answer in time.
    """
    try:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TurnError(f"{url}/metrics gave no answer: {error!r}") from error
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    """Add up the samples of each metric that is of interest."""
    found = dict.fromkeys(METRICS, 0.0)
    short = {name: key for key, name in METRICS.items()}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["name"] in short:
            found[short[match["name"]]] += float(match["value"])
    return found


def added(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What was counted in between."""
    return {key: after[key] - before[key] for key in after}


def summed(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counters of several engines together."""
    found = dict.fromkeys(METRICS, 0.0)
    for one in many:
        for key, value in one.items():
            found[key] += value
    return found
