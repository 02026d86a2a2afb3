# SPDX-License-Identifier: Apache-2.0
"""Faults that meet a pair of engines while hand-offs are in known stages."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fault_engines import (
    HANDSHAKE_TIMEOUT_S,
    LEASE_S,
    PEER_TIMEOUT_S,
    FaultPair,
    Policy,
    Side,
)
from fault_requests import (
    ABORTED,
    NO_ANSWER,
    HandOff,
    Outcome,
    Requests,
    Traffic,
    Verdict,
    clean,
    filler_asks,
    healthy_asks,
    quarantined,
    wrong,
)
from fault_stages import FLEETING, PULL_STAGES, PUSH_STAGES, Stages
from handoff_client import Client, completion, integrity
from handoff_workload import Ask, References

SLACK_S = 10.0
BOUND_S = PEER_TIMEOUT_S + HANDSHAKE_TIMEOUT_S + SLACK_S
"""A request that a fault touches ends within this, where it may fail."""
RECOMPUTE_S = 30.0
FILL_S = 20.0
FULL_BLOCKS = 40
"""An engine with fewer free blocks is full: no further prompt fits."""
NEXT_REQUESTS = 3

Fault = Literal[
    "kill",
    "stop",
    "cut",
    "abort",
    "leave",
    "refuse",
    "messages",
    "post",
    "completion",
]


@dataclass(frozen=True)
class World:
    """A running pair and what is needed to judge it."""

    pair: FaultPair
    requests: Requests
    client: Client
    references: References

    @property
    def may_fail(self) -> bool:
        """Whether a request that loses its KV may fail."""
        return self.pair.policy == "fail"

    def other(self, side: Side) -> Side:
        """The side that a fault of ``side`` leaves alone."""
        return "D" if side == "P" else "P"


def stages_of(world: World) -> tuple[str, ...]:
    """All stages of the pair's mode, in the order in which they are reached."""
    return PUSH_STAGES if world.pair.mode == "push" else PULL_STAGES


# ---- what happens


async def kill(world: World, victim: Side, then: Policy | None = None) -> Verdict:
    """SIGKILL to all processes of the victim; it comes back under the same id.

    The engine that takes its place has the policy ``then``.
    """
    pair, verdict = world.pair, Verdict()
    stages = await _reach(world, verdict, stages_of(world))
    survivor = world.other(victim)
    traffic = _local_traffic(world, survivor)
    pair.kill(victim)
    await _outlive(world, verdict, stages, victim)
    verdict.add_common(*await traffic.end())
    verdict.add_common(await clean(world.requests, pair.engine(survivor)))
    await _replace(world, victim, then)
    await aftermath(world, verdict)
    return verdict


async def leave(world: World, victim: Side, then: Policy | None = None) -> Verdict:
    """The victim is shut down while hand-offs are open; a new id takes its place."""
    pair, verdict = world.pair, Verdict()
    stages = await _reach(world, verdict, stages_of(world))
    survivor = world.other(victim)
    traffic = _local_traffic(world, survivor)
    leaving = asyncio.create_task(asyncio.to_thread(pair.leave, victim))
    await _outlive(world, verdict, stages, victim)
    await leaving
    verdict.add_common(*await traffic.end())
    verdict.add_common(await clean(world.requests, pair.engine(survivor)))
    pair.engine_ids[victim] += "+"
    await _replace(world, victim, then)
    await aftermath(world, verdict)
    return verdict


async def stop(world: World, victim: Side) -> Verdict:
    """SIGSTOP, and SIGCONT when the other side has given the victim up."""
    pair, verdict = world.pair, Verdict()
    stages = await _reach(world, verdict, stages_of(world))
    traffic = _local_traffic(world, world.other(victim))
    pair.signal(victim, signal.SIGSTOP)
    try:
        if victim == "P":
            await _judge_decode(world, verdict, stages, _decode_bound(world))
            fillers = await _fill_beside_quarantine(world, verdict, stages)
        else:
            # A reader relies on its lease, so silence does not end that.
            lasts = PEER_TIMEOUT_S if pair.mode == "push" else LEASE_S
            await asyncio.sleep(lasts + 2.0)
            verdict.add_common(await _given_up(world))
            fillers = []
        marks = _marks(world)
        clear(world)
    finally:
        pair.signal(victim, signal.SIGCONT)
    await _resume(world, verdict, stages, fillers, marks)
    verdict.add_common(*await traffic.end())
    await aftermath(world, verdict)
    return verdict


async def careless(world: World, victim: Side) -> Verdict:
    """As :func:`stop`, with a decode engine that quarantines nothing.

    It is a defect that must show, or the other scenarios would prove nothing.
    """
    world.pair.control("D").change(careless=True)
    found = await stop(world, victim)
    verdict = Verdict(problems={"late_transfer": []}, notes=found.notes)
    if not any("expected" in problem for problem in found.common):
        verdict.add("late_transfer", f"no answer is wrong, only this: {found}")
    return verdict


async def cut(world: World, victim: Side) -> Verdict:
    """Nothing passes between the two, until the cut heals."""
    pair, verdict = world.pair, Verdict()
    stages = await _reach(world, verdict, stages_of(world))
    traffic = _local_traffic(world, world.other(victim))
    pair.control(victim).change(cut=True)
    await _judge_decode(world, verdict, stages, _decode_bound(world))
    fillers = await _fill_beside_quarantine(world, verdict, stages)
    marks = _marks(world)
    clear(world)
    await _resume(world, verdict, stages, fillers, marks)
    verdict.add_common(*await traffic.end())
    await aftermath(world, verdict)
    return verdict


async def abort(world: World, victim: Side) -> Verdict:
    """The client hangs up the victim's leg."""
    pair, verdict = world.pair, Verdict()
    traffic = healthy_traffic(world)
    chosen = stages_of(world) if victim == "D" else ("mid_prefill",)
    stages = await _reach(world, verdict, chosen)
    for hand_off in stages.hand_offs.values():
        task = hand_off.decode if victim == "D" else hand_off.prefill
        if task is not None:
            task.cancel()
    held = {"mid_write", "mid_read"} & set(stages.hand_offs)
    if held and not await quarantined(world.requests, pair.decode):
        verdict.add(held.pop(), "blocks were let go of while they are written to")
    marks = _marks(world)
    clear(world)
    await _resume(world, verdict, stages, [], marks)
    verdict.add_common(*await traffic.end())
    await aftermath(world, verdict)
    return verdict


# ---- parts of it


async def _reach(world: World, verdict: Verdict, stages: Iterable[str]) -> Stages:
    """Put hand-offs into stages, beside healthy ones."""
    made = Stages(world.requests, world.pair)
    traffic = healthy_traffic(world)
    try:
        await made.reach(stage for stage in stages if stage not in FLEETING)
    finally:
        verdict.add_common(*await traffic.end())
    await made.reach(stage for stage in stages if stage in FLEETING)
    for stage, hand_off in made.hand_offs.items():
        verdict.problems.setdefault(stage, [])
        assert hand_off.decode is None or not hand_off.decode.done(), (
            f"{stage} is over before the fault: {hand_off.decode.result()}"
        )
    return made


def healthy_traffic(world: World) -> Traffic:
    async def send(ask: Ask) -> Outcome:
        return await HandOff(world.requests, world.pair, "healthy", ask).run()

    return Traffic(world.references, send)


def _local_traffic(world: World, side: Side) -> Traffic:
    engine = world.pair.engine(side)

    async def send(ask: Ask) -> Outcome:
        return await world.requests.send(engine, completion(ask))

    return Traffic(world.references, send)


def _decode_bound(world: World) -> float:
    return time.monotonic() + BOUND_S + (0.0 if world.may_fail else RECOMPUTE_S)


def clear(world: World) -> None:
    for side in ("P", "D"):
        world.pair.control(side).clear()


def _marks(world: World) -> dict[Side, int]:
    return {side: world.pair.control(side).mark() for side in ("P", "D")}


async def _outlive(
    world: World, verdict: Verdict, stages: Stages, victim: Side
) -> None:
    """See all requests of the survivor end while the victim is dead."""
    survivor = world.other(victim)
    for hand_off in stages.hand_offs.values():
        if survivor == "D" and hand_off.decode is None and world.pair.mode == "pull":
            if hand_off.name == "finished":
                hand_off.send_decode()
        elif survivor == "P" and hand_off.prefill is None:
            hand_off.send_prefill()
    await _judge_decode(world, verdict, stages, _decode_bound(world), victim)
    await _judge_prefill(world, verdict, stages, victim)
    world.pair.control(survivor).clear()


async def _judge_decode(
    world: World,
    verdict: Verdict,
    stages: Stages,
    deadline: float,
    dead: Side | None = None,
) -> None:
    for stage, hand_off in stages.hand_offs.items():
        if hand_off.decode is None:
            continue
        # It has its KV, so nothing bounds it but its length.
        bound = deadline + RECOMPUTE_S if stage == "decoding" else deadline
        outcome = await ended(hand_off.decode, bound)
        if outcome is None:
            verdict.add(
                stage, f"the decode request hangs {BOUND_S:g} s after the fault"
            )
            continue
        verdict.notes.append(f"{stage}: decode {outcome}")
        verdict.add(stage, wrong(world.references, hand_off.ask, outcome))
        must = stage == "decoding" or not world.may_fail
        verdict.add(stage, unfit(outcome, dead == "D", must))


async def _judge_prefill(
    world: World, verdict: Verdict, stages: Stages, dead: Side | None = None
) -> None:
    deadline = time.monotonic() + BOUND_S + RECOMPUTE_S
    for stage, hand_off in stages.hand_offs.items():
        if hand_off.prefill is None:
            continue
        outcome = await ended(hand_off.prefill, deadline)
        if outcome is None:
            verdict.add(stage, "the prefill request hangs")
            continue
        verdict.add(stage, unfit(outcome, dead == "P", must=True))


async def ended(task: asyncio.Task[Outcome], deadline: float) -> Outcome | None:
    done, _ = await asyncio.wait({task}, timeout=max(0.1, deadline - time.monotonic()))
    if done:
        return task.result()
    task.cancel()
    return None


def unfit(outcome: Outcome, dead: bool, must: bool) -> str | None:
    """Say why a request may not end so, given whether its engine was ended."""
    match outcome.status:
        case 200:
            return None
        case _ if outcome.status == ABORTED:
            return None
        case _ if outcome.status == NO_ANSWER or dead:
            return None if dead else f"the engine broke off: {outcome}"
        case 500 if not must:
            try:
                return None if "error" in json.loads(outcome.text) else "no error body"
            except ValueError:
                return f"the error is no JSON: {outcome}"
    return f"unexpected end: {outcome}"


async def _fill_beside_quarantine(
    world: World, verdict: Verdict, stages: Stages
) -> list[tuple[Ask, asyncio.Task[Outcome]]]:
    """Give all blocks of D that are not quarantined to other requests."""
    pair = world.pair
    moved = "mid_write" if pair.mode == "push" else "mid_read"
    if moved not in stages.hand_offs:
        return []
    count = await quarantined(world.requests, pair.decode)
    metrics = await world.client.metrics(pair.decode)
    gauge = metrics.get("vllm:nixl_quarantined_blocks", 0)
    verdict.notes.append(f"quarantined: {count} blocks, {gauge:g} in the gauge")
    if not count:
        verdict.add(moved, "no blocks are quarantined, though they may be written to")
    if gauge != count:
        verdict.add_common(f"{count} blocks are quarantined, the gauge says {gauge:g}")
    fillers = [
        (ask, asyncio.create_task(world.requests.send(pair.decode, completion(ask))))
        for ask in filler_asks()
    ]
    deadline = time.monotonic() + FILL_S
    free = FULL_BLOCKS
    while free >= FULL_BLOCKS:
        if time.monotonic() > deadline:
            verdict.add(moved, f"{free} blocks are free: D could not be filled")
            break
        await asyncio.sleep(0.05)
        free = (await integrity(pair.decode))["free_blocks"]
    verdict.notes.append(f"filled: {free} blocks free at the late transfer")
    return fillers


async def _resume(
    world: World,
    verdict: Verdict,
    stages: Stages,
    fillers: list[tuple[Ask, asyncio.Task[Outcome]]],
    marks: dict[Side, int],
) -> None:
    """See all end well after the fault."""
    pair = world.pair
    side: Side
    moved, side, kind = (
        ("mid_write", "P", "WRITE")
        if pair.mode == "push"
        else ("mid_read", "D", "READ")
    )
    if moved in stages.hand_offs:
        transfer = stages.hand_offs[moved].transfer_id
        if fillers and all(task.done() for _, task in fillers):
            verdict.add(moved, "D is not full any more at the late transfer")
        await asyncio.to_thread(
            pair.control(side).wait,
            f"the late {kind}",
            lambda e: e.what == "posted" and e.transfer == transfer,
            SLACK_S,
            marks[side],
        )
    for stage, hand_off in stages.hand_offs.items():
        if stage == "registered" and hand_off.prefill is None:
            hand_off.send_prefill()
        elif stage == "finished" and hand_off.decode is None:
            hand_off.send_decode()
    for ask, task in fillers:
        outcome = await ended(task, time.monotonic() + BOUND_S + RECOMPUTE_S)
        if outcome is None or outcome.status != 200:
            verdict.add_common(f"a request beside the quarantine: {outcome}")
        else:
            verdict.add_common(wrong(world.references, ask, outcome))
    await _judge_decode(world, verdict, stages, _decode_bound(world))
    await _judge_prefill(world, verdict, stages)


async def _given_up(world: World) -> str | None:
    """Whether P has let go of a silent D, but for the WRITEs that are under way."""
    document = await integrity(world.pair.prefill)
    tables = document["tables"]
    claims = tables["rank0_sender_claims"]
    if claims <= tables["rank0_transfers"]:
        return None
    return f"P keeps {claims} claims of a D that is silent: {document}"


async def _replace(world: World, side: Side, then: Policy | None) -> None:
    pair = world.pair
    await asyncio.to_thread(pair.reap, side)
    if then is not None:
        pair.policy = then
    await asyncio.to_thread(pair.start, side)


async def aftermath(world: World, verdict: Verdict) -> None:
    """Both engines hold nothing, live, and hand off what comes next."""
    pair = world.pair
    clear(world)
    for engine in (pair.prefill, pair.decode):
        verdict.add_common(await clean(world.requests, engine))
    for ask in healthy_asks()[:NEXT_REQUESTS]:
        outcome = await HandOff(world.requests, pair, "next", ask).run()
        verdict.add_common(wrong(world.references, ask, outcome))
        if outcome.status != 200:
            verdict.add_common(f"the next request: {outcome}")
    for engine in (pair.prefill, pair.decode):
        verdict.add_common(await clean(world.requests, engine))
        if not engine.running:
            verdict.add_common(f"{engine.name} has ended: {engine.returncode}")
