# SPDX-License-Identifier: Apache-2.0
"""Engines that have nothing to do, do nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from handoff_client import Client, assert_clean
from handoff_workload import Ask, References, fresh
from pd_launcher import Mode, Pair
from pd_processes import group_members

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

# An engine's worker looks out for its next step without a pause for a second.
QUIET_S = 5.0
MEASURED_S = 5.0
AIM = 0.05
LIMIT = 0.10


def _cpu_seconds(group: int) -> dict[tuple[int, str], float]:
    """CPU time of each process of a group, by its id and name."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[tuple[int, str], float] = {}
    for pid in group_members(group):
        proc = Path("/proc") / str(pid)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        name = (proc / "cmdline").read_text().split("\0")[0]
        found[pid, name] = (int(fields[11]) + int(fields[12])) / tick
    return found


async def test_idle_cpu(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    """A measurement with an agreed limit: no thread of ours spins."""
    prompt = fresh("idle")[0]
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)
    await assert_clean(client, pair)
    await asyncio.sleep(QUIET_S)

    groups = (pair.prefill.pid, pair.decode.pid)
    before = [_cpu_seconds(group) for group in groups]
    await asyncio.sleep(MEASURED_S)
    after = [_cpu_seconds(group) for group in groups]

    workers: list[float] = []
    for engine, old, new in zip(
        (pair.prefill, pair.decode), before, after, strict=True
    ):
        for process, seconds in new.items():
            share = (seconds - old[process]) / MEASURED_S
            print(f"{mode} {engine.name} idle: {share:6.1%} of a core, {process[1]}")
            if process[1].startswith("VLLM::Worker"):
                workers.append(share)
    print(f"{mode}: idle workers {workers}, aim below {AIM:.0%}")
    assert len(workers) == 2
    assert max(workers) < LIMIT
