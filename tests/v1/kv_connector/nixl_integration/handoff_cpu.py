# SPDX-License-Identifier: Apache-2.0
"""How much CPU time the processes of idle engines use."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pd_launcher import Engine
from pd_processes import group_members

# An engine's worker looks out for its next step without a pause for a second.
QUIET_S = 2.5
MEASURED_S = 4.0
AIM = 0.05
LIMIT = 0.10


async def idle_workers(*engines: Engine) -> list[float]:
    """The share of a core that each worker of the engines uses, once it is quiet."""
    await asyncio.sleep(QUIET_S)
    before = [_cpu_seconds(engine.pid) for engine in engines]
    await asyncio.sleep(MEASURED_S)
    after = [_cpu_seconds(engine.pid) for engine in engines]
    workers: list[float] = []
    for engine, old, new in zip(engines, before, after, strict=True):
        for process, seconds in new.items():
            share = (seconds - old[process]) / MEASURED_S
            print(f"{engine.name} idle: {share:6.1%} of a core, {process[1]}")
            if process[1].startswith("VLLM::Worker"):
                workers.append(share)
    print(f"idle workers {workers}, aim below {AIM:.0%}")
    return workers


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
