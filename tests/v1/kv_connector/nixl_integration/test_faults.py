# SPDX-License-Identifier: Apache-2.0
"""Faults by victim and stage, on real engines beside healthy traffic.

A scenario brings one hand-off into every stage at once, lets the fault happen, and
judges each stage as a cell of its own: the request ends within its bound, in an
error or in the right text; afterwards both engines hold nothing and hand off what
comes next. Scenarios follow one another on engines that are replaced only where the
fault or the failure policy asks for it.

    fault       what happens                                     stages
    kill        SIGKILL; then a restart with the same engine id  all
    leave       SIGTERM; then a restart with a new engine id     all
    stop        SIGSTOP; SIGCONT once the other has given it up  all
    cut         nothing passes, notifications, transfers and
                side channel alike; then it heals                all
    abort       the client hangs up the victim's leg             all; for P mid_prefill
    messages    notifications are lost, repeated, delayed        by kind
    transfers   posting fails, completion fails, or it is slow   mid_write, mid_read
    refuse      wrong mode, wrong token, nobody at the address   before registration
    routed      stop, seen by a router's client                  mid_write, mid_read
    careless    stop, with a defect that must be noticed         mid_write

Stages of push: ``before_registration`` (D holds blocks, P does not know of them),
``registered``, ``mid_prefill``, ``mid_write``, ``written`` (all bytes are there, the
news is lost), ``decoding``. Of pull: ``mid_prefill``, ``finished``, ``leased`` (the
grant is lost), ``mid_read``, ``read`` (grant and confirmation are lost),
``decoding``.

Cells that are left out, and why:

    abort of P, not mid_prefill      its request has ended already, or not begun
    pull before registration         that is ``finished``: D has not been asked
    transfers in other stages        nothing is posted then
    refuse in other stages           both sides have shaken hands by then
    refuse by D                      D answers no handshake; P refuses D's messages
    wrong token at P                 these engines have none; the unit tests do
    messages without a hand-off      hello_ack, ping, pong, renew, goodbye: cut and
                                     leave lose them all, the model each of them
    lost read_done twice and more,
    any order of several losses      left to the exhaustive model
    recompute: kill, stop of D,
    messages of D                    the policy acts on a D that lives and loses KV
    recompute: cut of P              to D it is the same as a cut of D
    leave of D with policy fail      done once, with policy recompute
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest

from fault_engines import FaultPair, Policy, Side
from fault_messages import (
    HANDSHAKES,
    MESSAGES,
    messages,
    refuse,
    transfer_cases,
    transfers,
)
from fault_requests import Requests, Verdict, all_fault_asks, make_references
from fault_routed import ROUTED, routed
from fault_scenarios import World, abort, careless, cut, kill, leave, stop
from fault_stages import PULL_STAGES, PUSH_STAGES
from handoff_client import Client
from handoff_engines import EngineRoom
from handoff_workload import References
from pd_launcher import Mode

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Scenario:
    """One fault, which meets hand-offs in all stages at once.

    ``then`` is the policy of the decode engine that takes a dead one's place.
    """

    mode: Mode
    policy: Policy
    fault: str
    victim: Side
    stages: tuple[str, ...]
    full: bool = False
    then: Policy | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.policy}-{self.fault}-{self.victim}"


def _scenarios() -> Iterator[Scenario]:
    modes: tuple[Mode, ...] = ("push", "pull")
    for mode in modes:
        stages = PUSH_STAGES if mode == "push" else PULL_STAGES
        push = mode == "push"
        mover: Side = "P" if push else "D"

        def of(
            policy: Policy,
            fault: str,
            victim: Side,
            stages: tuple[str, ...] = stages,
            *,
            mode: Mode = mode,
            full: bool = False,
            then: Policy | None = None,
        ) -> Scenario:
            return Scenario(mode, policy, fault, victim, stages, full, then)

        yield of("fail", "abort", "D")
        yield of("fail", "abort", "P", ("mid_prefill",), full=not push)
        yield of("fail", "messages", "P", tuple(MESSAGES[mode, "P"]), full=not push)
        yield of("fail", "messages", "D", tuple(MESSAGES[mode, "D"]))
        yield of("fail", "transfers", mover, tuple(transfer_cases(mode)))
        yield of("fail", "refuse", "P", HANDSHAKES["P"], full=not push)
        yield of("fail", "refuse", "D", HANDSHAKES["D"], full=not push)
        yield of("fail", "stop", "P", full=not push)
        yield of("fail", "stop", "D", full=True)
        yield of("fail", "routed", "P", ROUTED, full=not push)
        yield of("fail", "cut", "P", full=True)
        yield of("fail", "cut", "D", full=True)
        yield of("fail", "leave", "P", full=True)
        if push:
            yield of("fail", "careless", "P", ("late_transfer",))
        yield of("fail", "kill", "P", full=not push)
        yield of("fail", "kill", "D", full=not push, then="recompute")
        yield of(
            "recompute", "transfers", mover, tuple(transfer_cases(mode)), full=True
        )
        yield of("recompute", "messages", "P", tuple(MESSAGES[mode, "P"]), full=True)
        yield of("recompute", "refuse", "P", HANDSHAKES["P"], full=True)
        yield of("recompute", "abort", "D", full=True)
        yield of("recompute", "stop", "P", full=True)
        yield of("recompute", "cut", "D", full=True)
        yield of("recompute", "kill", "P", full=True)
        yield of("recompute", "leave", "D", full=True, then="fail")


class Stage:
    """Runs scenarios, each once, on pairs that are kept while they can be."""

    def __init__(self, room: EngineRoom) -> None:
        self._room = room
        self._pair: FaultPair | None = None
        self._references: References | None = None
        self._verdicts: dict[Scenario, Verdict | Exception] = {}
        self._pairs = itertools.count()

    async def verdict(self, scenario: Scenario) -> Verdict:
        """What a scenario shows; it is played at the first call."""
        if scenario not in self._verdicts:
            try:
                self._verdicts[scenario] = await self._play(scenario)
            except Exception as error:  # noqa: BLE001 - raised below, for every cell
                self._verdicts[scenario] = error
                self.close()
        found = self._verdicts[scenario]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Stop the engines."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    async def _play(self, scenario: Scenario) -> Verdict:
        pair = await asyncio.to_thread(self._ready, scenario.mode, scenario.policy)
        timeout = aiohttp.ClientTimeout(total=180)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector
        ) as session:
            requests = Requests(session)
            if self._references is None:
                self._references = await make_references(
                    requests, pair.decode, all_fault_asks()
                )
            world = World(pair, requests, Client(session), self._references)
            verdict = await _play(world, scenario)
        print(f"\n{scenario.name}")
        for note in verdict.notes:
            print(f"    {note}")
        return verdict

    def _ready(self, mode: Mode, policy: Policy) -> FaultPair:
        pair = self._pair
        if pair is not None and pair.ready() and pair.mode == mode:
            if pair.policy != policy:
                pair.leave("D")
                pair.policy = policy
                pair.start("D")
            return pair
        self.close()
        self._room.close()
        folder = self._room.log_dir / f"faults-{next(self._pairs)}"
        self._pair = pair = FaultPair(mode, policy, folder)
        pair.start("P", "D")
        return pair


async def _play(world: World, scenario: Scenario) -> Verdict:
    victim = scenario.victim
    match scenario.fault:
        case "kill":
            return await kill(world, victim, scenario.then)
        case "leave":
            return await leave(world, victim, scenario.then)
        case "stop":
            return await stop(world, victim)
        case "cut":
            return await cut(world, victim)
        case "careless":
            return await careless(world, victim)
        case "abort":
            return await abort(world, victim)
        case "messages":
            return await messages(world, victim)
        case "transfers":
            return await transfers(world)
        case "routed":
            return await routed(world)
        case "refuse":
            return await refuse(world, victim)
    raise ValueError(scenario.fault)


@pytest.fixture(scope="module")
def stage(room: EngineRoom) -> Iterator[Stage]:
    made = Stage(room)
    yield made
    made.close()


def _cells() -> Iterator[object]:
    for scenario in _scenarios():
        for name in scenario.stages:
            marks = [pytest.mark.full] if scenario.full else []
            yield pytest.param(
                scenario, name, id=f"{scenario.name}-{name}", marks=marks
            )


@pytest.mark.parametrize(("scenario", "cell"), list(_cells()))
async def test_fault(stage: Stage, scenario: Scenario, cell: str) -> None:
    verdict = await stage.verdict(scenario)

    assert verdict.common == []
    assert verdict.problems[cell] == []
