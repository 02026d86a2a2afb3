# SPDX-License-Identifier: Apache-2.0
"""Visits every order in which a few things can happen, once per distinct state."""

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from types import NoneType
from typing import Any, cast

import msgspec
import numpy as np

from v1.kv_connector.unit.nixl.ground_truth import REPEAT, Violation
from v1.kv_connector.unit.nixl.simulation import Simulation
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)


@dataclass(frozen=True)
class Planned:
    """A decode request that may start at any moment.

    ``hint`` is the kind of what it says of the KV's place, if anything; what was told
    can be said from then on.
    """

    registration_id: RegistrationId
    transfer_id: TransferId
    decode: AgentName
    hint: str = ""


@dataclass
class Budget:
    """How often each thing that nobody plans may happen."""

    losses: int = 0
    repeats: int = 0
    cancels: int = 0
    withdrawals: int = 0
    chunks: int = 0
    preemptions: int = 0
    failures: int = 0
    silences: int = 0
    deaths: int = 0
    restarts: int = 0
    ticks: int = 0


@dataclass
class Case:
    """Requests that are to come, and the state that they have led to."""

    simulation: Simulation
    to_expect: dict[TransferId, int | None]
    to_start: list[Planned]
    budget: Budget
    trace: tuple[str, ...] = ()


@dataclass
class Explored:
    """What a search has covered; ``complete`` unless its limit cut it short."""

    states: int = 0
    steps: int = 0
    settled: int = 0
    complete: bool = True


Step = tuple[str, str | None, Callable[[Case], object]]
"""What happens, the budget that it takes from, and how."""


def explore(
    case: Case, depth: int, settle_each: int = 1, limit: int = 200_000
) -> Explored:
    """Go through all states that are at most ``depth`` steps away.

    From each ``settle_each``-th of them the network is reliable, and everything must
    come to its end.

    Raises:
        Violation: naming the steps that lead to it.
    """
    explored = Explored()
    seen: set[int] = set()
    frontier = [pickle.dumps(case)]
    for _ in range(depth):
        following: list[bytes] = []
        for packed in frontier:
            for step in list(_steps(pickle.loads(packed))):
                child = _child(packed, step)
                explored.steps += 1
                key = hash(_freeze(child, child.simulation.now))
                if key in seen:
                    continue
                seen.add(key)
                explored.states += 1
                following.append(pickle.dumps(child))
                if explored.states % settle_each == 0:
                    explored.settled += 1
                    _guarded(child, _settle)
                if explored.states == limit:
                    explored.complete = False
                    return explored
        frontier = following
    return explored


def _child(packed: bytes, step: Step) -> Case:
    case: Case = pickle.loads(packed)
    name, budget, take = step
    if budget is not None:
        setattr(case.budget, budget, getattr(case.budget, budget) - 1)
    case.trace = (*case.trace, name)
    _guarded(case, take)
    return case


def _guarded(case: Case, step: Callable[[Case], object]) -> None:
    try:
        step(case)
    except Violation as violation:
        raise Violation(f"{violation}; after {', '.join(case.trace)}") from violation


def _settle(case: Case) -> None:
    case.simulation.settle()
    case.simulation.check_over()


def _steps(case: Case) -> Iterator[Step]:
    budget = case.budget
    for step in (*_planned(case), *_moves(case.simulation), *_trouble(case.simulation)):
        if step[1] is None or getattr(budget, step[1]):
            yield step


def _planned(case: Case) -> Iterator[Step]:
    for transfer_id in case.to_expect:
        yield f"expect {transfer_id}", None, partial(_expect, transfer_id=transfer_id)
    for planned in case.to_start:
        told = planned.transfer_id in case.simulation.told
        if not case.simulation.startable(planned.transfer_id) or (
            planned.hint in ("told", "lie") and not told
        ):
            continue
        label = f"start {planned.registration_id}"
        yield label, None, partial(_start, planned=planned)


def _expect(case: Case, transfer_id: TransferId) -> None:
    case.simulation.expect(transfer_id, case.to_expect.pop(transfer_id))


def _start(case: Case, planned: Planned) -> None:
    case.to_start.remove(planned)
    simulation = case.simulation
    hint = simulation.hint(planned.transfer_id, planned.hint)
    if simulation.start(
        planned.decode, planned.registration_id, planned.transfer_id, hint=hint
    ):
        simulation.connect(planned.registration_id)


def _do(method: str, *args: object) -> Callable[[Case], object]:
    return lambda case: getattr(case.simulation, method)(*args)


def _moves(simulation: Simulation) -> Iterator[Step]:
    for transfer_id, prefill in simulation.prefills.items():
        if prefill.computing:
            yield f"offer {transfer_id}", None, _do("offer", transfer_id)
            chunk = _do("offer_chunk", transfer_id)
            yield f"compute a chunk of {transfer_id}", "chunks", chunk
    for label, method, arguments in simulation.own_moves():
        yield label, None, _do(method, *arguments)
    for index, label in _distinct(simulation):
        yield f"deliver {label}", None, _do("deliver", index)
    for registration_id, attempt in simulation.attempts.items():
        for rank in attempt.to_cancel:
            give_up = _do("give_up", registration_id, rank)
            yield f"{rank} hears that {registration_id} has failed", None, give_up
    for index, write in enumerate(simulation.writes):
        label = f"{write.action.registration_id} of {write.prefill} to"
        label = f"{label} {write.action.peer}"
        if write.unposted:
            yield f"post {label}", None, _do("post", index)
        for which, piece in enumerate(write.posted):
            yield f"land {piece} {label}", None, _do("land", index, which)
    for index, read in enumerate(simulation.reads):
        label = f"{read.decode} read {read.action.registration_id} from"
        label = f"{label} {read.action.peer}"
        yield label, None, _do("end_read", index)
    yield "tick", "ticks", _tick


def _tick(case: Case) -> None:
    case.simulation.advance(REPEAT + 0.5)
    case.simulation.tick()


def _trouble(simulation: Simulation) -> Iterator[Step]:
    for index, label in _distinct(simulation):
        yield f"lose {label}", "losses", _do("lose", index)
        yield f"repeat {label}", "repeats", _do("repeat", index)
    for registration_id, attempt in simulation.attempts.items():
        alive = not simulation.dead.intersection(attempt.ranks)
        if not attempt.cancelled and alive:
            yield f"cancel {registration_id}", "cancels", _do("cancel", registration_id)
    for transfer_id, prefill in simulation.prefills.items():
        yield f"withdraw {transfer_id}", "withdrawals", _do("withdraw", transfer_id)
        if prefill.computing and prefill.blocks:
            yield f"preempt {transfer_id}", "preemptions", _do("preempt", transfer_id)
    for index, write in enumerate(simulation.writes):
        label = f"break {write.action.registration_id} of {write.prefill}"
        yield label, "failures", _do("break_write", index)
    for index, read in enumerate(simulation.reads):
        label = f"break read {read.action.registration_id}"
        yield label, "failures", _do("end_read", index, False)
    yield from _ends(simulation)


def _ends(simulation: Simulation) -> Iterator[Step]:
    sides = (tuple(simulation.senders), tuple(simulation.receivers))
    for owners, peers in (sides, sides[::-1]):
        for owner in owners:
            if owner in simulation.dead:
                continue
            for peer in peers:
                label = f"{owner} gives up on {peer}"
                yield label, "silences", _do("give_up_on", owner, peer)
                if peer in simulation.dead:
                    yield f"{owner} sees {peer} end", None, _do("prove", owner, peer)
            yield f"{owner} dies", "deaths", _do("die", owner)
    if simulation.mode is Mode.PULL and not simulation.dead:
        yield "restart", "restarts", _do("restart")


def _distinct(simulation: Simulation) -> Iterator[tuple[int, str]]:
    seen: set[Hashable] = set()
    for index, envelope in enumerate(simulation.network):
        key = _freeze(envelope, 0.0)
        if key not in seen:
            seen.add(key)
            name = type(envelope.message).__name__
            yield index, f"{name} to {envelope.target}"


_IGNORED = {
    "started_at",
    "offered_at",
    "kept_at",
    "size",
    "tokens",
    "trace",
    "now",
    "layout",
    "announced",
}
"""What has no influence on what may happen."""


_PLAIN = {str, bytes, int, bool, Fraction, NoneType}


def _freeze(value: Any, now: float) -> Hashable:
    """A value that two states share if they can lead to the same things."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, Enum):
        return cast(Hashable, value)
    if kind is float:
        return -1.0 if value < now else round(value - now, 3)
    if kind in (dict, OrderedDict):
        return frozenset((k, _freeze(v, now)) for k, v in value.items())
    if kind in (set, list):
        return frozenset(Counter(_freeze(v, now) for v in value).items())
    if kind is tuple:
        return tuple(_freeze(v, now) for v in value)
    if kind is np.ndarray:
        return cast(bytes, value.tobytes())
    if isinstance(value, msgspec.Struct):
        return (kind, msgspec.msgpack.encode(value))
    if isinstance(value, type):
        return value
    return tuple(
        _freeze(getattr(value, name), now) for name in _relevant(tuple(vars(value)))
    )


@cache
def _relevant(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _IGNORED)
