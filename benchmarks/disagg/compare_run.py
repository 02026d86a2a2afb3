# SPDX-License-Identifier: Apache-2.0
"""Runs one load on a system that is up, and takes down what it cost."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench_requests import COMPLETIONS, Answer, TurnError, completion, post
from compare_counters import (
    Counters,
    CpuTimes,
    added,
    counters,
    cpu_times,
    events,
    metrics,
)
from compare_legs import serve
from compare_loads import ANSWER_TOKENS, Ask, Load
from compare_systems import Fleet
from multiturn_records import write_json

REST_S = 0.4
SETTLE_S = 6.0
"""Longest wait for blocks to be free after the last answer."""

_POLL_S = 0.1
_NUDGE = (5,)


@dataclass(frozen=True)
class Sample:
    """One request; times are in seconds, ``None`` where they do not apply.

    Attributes:
        prefill: from sending to the end of the prefill, as P's scheduler sees it.
        handoff: from then to the scheduling of D's first step for this request; less
            than zero where D starts before P's scheduler hears of the end.
        connectors: the end of that, from the moment at which D has asked for the KV
            too; what comes before is the way through client and front ends.
        first_step: from then to the first token at the client.
        moved_tokens: what D's scheduler was promised from outside.
    """

    prompt_tokens: int
    ttft: float
    tpot: float
    moved_tokens: int
    answer: tuple[int, ...]
    prefill: float | None = None
    handoff: float | None = None
    connectors: float | None = None
    first_step: float | None = None


@dataclass
class Result:
    """One load on one system in one round; times are in seconds.

    Attributes:
        began: seconds since the epoch.
        seconds: from the first request to the last token.
        block_seconds: of the prefill engine's blocks, over all requests.
        forward_hooks: thread time of the connector's hooks on the forward threads.
        hook_p99: of that, per engine step, by engine.
        forward_threads: CPU time of the forward threads, computing included.
        worker_rest: CPU time of the workers' other threads.
        cpu: CPU time of all engine processes while requests were served.
        decode: the decode engine's counters; ``prefill`` the other's.
        errors: requests that failed.
    """

    system: str
    load: str
    rate: float
    round: int
    requests: int
    load_average: float
    began: float = 0.0
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    block_seconds: float = 0.0
    blocks_left: float = 0.0
    forward_hooks: dict[str, float] = field(default_factory=dict)
    forward_hooks_wall: dict[str, float] = field(default_factory=dict)
    hook_steps: dict[str, float] = field(default_factory=dict)
    hook_p99: dict[str, float | None] = field(default_factory=dict)
    scheduler_hooks: dict[str, float] = field(default_factory=dict)
    forward_threads: dict[str, float] = field(default_factory=dict)
    worker_rest: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the result as JSON."""
        name = f"{self.system}_{self.load.replace(' ', '-')}_round{self.round + 1}"
        write_json(folder / f"{name}.json", asdict(self))


def load_results(folder: Path) -> list[Result]:
    """Read what :meth:`Result.save` has written, in the order of the rounds."""
    found = []
    for path in folder.glob("*_round*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        document["samples"] = [
            Sample(**{**sample, "answer": tuple(sample["answer"])})
            for sample in document["samples"]
        ]
        found.append(Result(**document))
    return sorted(found, key=lambda result: (result.round, result.began))


@dataclass(frozen=True)
class _State:
    """An engine's counters at one moment."""

    probe: Counters
    cpu: CpuTimes


async def run_load(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    load: Load,
    sent: Sequence[Ask],
    number: int,
) -> Result:
    """Send the requests of a load at their times; a failed one is an error inside.

    Raises:
        TurnError: an engine does not answer at all.
    """
    await asyncio.sleep(REST_S)
    result = Result(
        fleet.system.name,
        load.name,
        load.rate,
        number,
        len(sent),
        os.getloadavg()[0],
        time.time(),
    )
    counted = await _metrics(session, fleet)
    before = _states(fleet)
    ids = [uuid.uuid4().hex for _ in sent]
    began = time.monotonic()
    answers = await asyncio.gather(
        *(
            _ask(session, fleet, ask, request_id, began, result.errors)
            for ask, request_id in zip(sent, ids, strict=True)
        )
    )
    result.seconds = time.monotonic() - began
    cpu = {role: cpu_times(engine.pid) for role, engine in fleet.engines.items()}
    await _settle(fleet)
    after = _states(fleet)
    await _nudge(session, fleet)
    for role, end in (await _metrics(session, fleet)).items():
        result.counted[role] = added(end, counted[role])
    _account(result, before, after, cpu)
    result.samples = _samples(fleet, sent, ids, answers)
    return result


async def _ask(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    ask: Ask,
    request_id: str,
    began: float,
    errors: list[str],
) -> tuple[float, Answer] | None:
    await asyncio.sleep(max(0.0, began + ask.at - time.monotonic()))
    sent = time.monotonic()
    try:
        answer = await serve(
            session, fleet.target, request_id, ask.prompt, ANSWER_TOKENS
        )
    except TurnError as error:
        errors.append(f"request {ask.number}: {error}")
        return None
    return sent, answer


async def _settle(fleet: Fleet) -> None:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if not any(counters(fleet.probes, role).blocks_used for role in fleet.engines):
            return
        await asyncio.sleep(_POLL_S)


async def _nudge(session: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Have each engine take a step, with which it publishes what it has counted."""
    body = completion(fleet.target.model, _NUDGE, 1)
    for engine in fleet.engines.values():
        await post(session, engine.url + COMPLETIONS, body)


async def _metrics(
    session: aiohttp.ClientSession, fleet: Fleet
) -> dict[str, dict[str, float]]:
    return {
        role: await metrics(session, engine.url)
        for role, engine in fleet.engines.items()
    }


def _states(fleet: Fleet) -> dict[str, _State]:
    return {
        role: _State(counters(fleet.probes, role), cpu_times(engine.pid))
        for role, engine in fleet.engines.items()
    }


def _account(
    result: Result,
    before: Mapping[str, _State],
    after: Mapping[str, _State],
    cpu: Mapping[str, CpuTimes],
) -> None:
    for role, start in before.items():
        probe = after[role].probe.since(start.probe)
        spent = cpu[role].since(start.cpu)
        result.forward_hooks[role] = probe.forward_cpu
        result.forward_hooks_wall[role] = probe.forward_wall
        result.hook_steps[role] = probe.forward_steps
        result.hook_p99[role] = probe.step_quantile(0.99)
        result.scheduler_hooks[role] = probe.scheduler_cpu
        result.forward_threads[role] = spent.forward
        result.worker_rest[role] = spent.worker_rest
        result.cpu[role] = spent.total
        result.blocks_left += probe.blocks_used
    first = "prefill" if "prefill" in before else "decode"
    earlier, later = before[first].probe, after[first].probe
    result.block_seconds = later.since(earlier).block_seconds


def _samples(
    fleet: Fleet,
    sent: Sequence[Ask],
    ids: Sequence[str],
    answers: Sequence[tuple[float, Answer] | None],
) -> list[Sample]:
    told = {role: events(fleet.probes, role) for role in fleet.engines}
    found = []
    for ask, request_id, received in zip(sent, ids, answers, strict=True):
        if received is None:
            continue
        at, answer = received
        moved = sum(
            int(event["tokens"])
            for event in told["decode"]
            if event["event"] == "asked" and request_id in event["id"]
        )
        sample = Sample(
            prompt_tokens=len(ask.prompt),
            ttft=answer.ttft,
            tpot=(answer.total - answer.ttft) / (len(answer.tokens) - 1),
            moved_tokens=moved,
            answer=answer.tokens,
        )
        ended = _when(told.get("prefill", ()), "finished", request_id)
        asked = _when(told["decode"], "asked", request_id)
        resumed = _when(told["decode"], "resumed", request_id)
        if ended is not None and asked is not None and resumed is not None:
            sample = replace(
                sample,
                prefill=ended - at,
                handoff=resumed - ended,
                connectors=resumed - max(asked, ended),
                first_step=at + answer.ttft - resumed,
            )
        found.append(sample)
    return found


def _when(
    told: Sequence[Mapping[str, Any]], kind: str, request_id: str
) -> float | None:
    for event in told:
        if event["event"] == kind and request_id in event["id"]:
            return float(event["time"])
    return None
