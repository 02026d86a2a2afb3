# SPDX-License-Identifier: Apache-2.0
"""Kept KV and its readers under long random histories."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from v1.kv_connector.unit.nixl.faulty import ClosesUnderReaders, ConfirmsLateReads
from v1.kv_connector.unit.nixl.ground_truth import POSITIONS, Violation
from v1.kv_connector.unit.nixl.kept_simulation import KeptSimulation, Lender
from v1.kv_connector.unit.nixl.test_protocol import EXAMPLES, SEARCH
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)

some = st.integers(0, 10**6)
rarely_not = st.sampled_from([True, True, True, False])

Move = Callable[[], object]


class KeptMachine(RuleBasedStateMachine):
    """What a test may do next; the simulation itself checks what comes of it."""

    lender: ClassVar[type[Lender]] = Lender

    @initialize(
        ranks=st.integers(1, 2),
        reader_ranks=st.lists(st.integers(1, 2), min_size=2, max_size=2),
    )
    def begin(self, ranks: int, reader_ranks: list[int]) -> None:
        self.count = 0
        self.sim = KeptSimulation(ranks, lender=self.lender, reader_ranks=reader_ranks)

    # ---- what the engines do

    @rule()
    def keep(self) -> None:
        self.count += 1
        self.sim.expect(TransferId(f"kept-{self.count}"))

    @precondition(lambda self: self.sim.known)
    @rule(pick=some, which=some, first=st.integers(0, POSITIONS - 1), up=rarely_not)
    def start(self, pick: int, which: int, first: int, up: bool) -> None:
        known = sorted(self.sim.known)
        readers = list(self.sim.layout.decode)
        registration_id = RegistrationId(f"r{self.count}")
        self.count += 1
        name = known[-1 - which % min(3, len(known))]
        reader = readers[pick % len(readers)]
        if self.sim.start(reader, registration_id, name, first) and up:
            self.sim.connect(registration_id)

    @precondition(lambda self: self.sim.prefills)
    @rule(pick=some)
    def let_go(self, pick: int) -> None:
        kept = list(self.sim.prefills)
        self.sim.withdraw(kept[pick % len(kept)])

    # ---- what goes on

    @rule(picks=st.lists(some, min_size=1, max_size=6))
    def progress(self, picks: list[int]) -> None:
        for pick in picks:
            self._take_one(list(self._moves()), pick)

    @rule(count=st.integers(1, 8))
    def orderly_progress(self, count: int) -> None:
        for _ in range(count):
            self._take_one(list(self._moves()), 0)

    @rule(pick=some)
    def trouble(self, pick: int) -> None:
        self._take_one(list(self._trouble()), pick)

    @rule(pick=some, dies=rarely_not)
    def silence(self, pick: int, dies: bool) -> None:
        self._take_one(list(self._ends(not dies)), pick)

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.sim.advance(seconds)
        self.sim.tick()

    @staticmethod
    def _take_one(choices: list[Move], pick: int) -> None:
        if choices:
            choices[pick % len(choices)]()

    def _moves(self) -> Iterator[Move]:
        for _, method, arguments in self.sim.own_moves():
            yield partial(getattr(self.sim, method), *arguments)
        for index in range(len(self.sim.network)):
            yield partial(self.sim.deliver, index)
        for index in range(len(self.sim.reads)):
            yield partial(self.sim.end_read, index)

    def _trouble(self) -> Iterator[Move]:
        sim = self.sim
        for index in range(len(sim.network)):
            yield partial(sim.lose, index)
            yield partial(sim.repeat, index)
        for index in range(len(sim.reads)):
            yield partial(sim.end_read, index, ok=False)
        for registration_id, attempt in list(sim.attempts.items())[-4:]:
            if not sim.dead.intersection(attempt.ranks):
                yield partial(sim.cancel, registration_id)
            for rank, part in attempt.ranks.items():
                if part.connecting:
                    yield partial(sim.connect_rank, registration_id, rank)
                if part.connecting and not part.over:
                    yield partial(sim.unreachable, registration_id, rank)
            for rank in attempt.to_cancel:
                yield partial(sim.give_up, registration_id, rank)

    def _ends(self, deaths: bool) -> Iterator[Move]:
        sim = self.sim
        sides: tuple[list[AgentName], list[AgentName]] = (
            list(sim.senders),
            list(sim.receivers),
        )
        for owners, peers in (sides, sides[::-1]):
            for owner in owners:
                if owner in sim.dead:
                    continue
                for peer in peers:
                    if peer in sim.dead:
                        yield partial(sim.prove, owner, peer)
                    yield partial(sim.give_up_on, owner, peer)
                if deaths:
                    yield partial(sim.die, owner)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.settle()
            self.sim.check_over()


@pytest.mark.timeout(120)
def test_random_histories() -> None:
    run_state_machine_as_test(KeptMachine, settings=EXAMPLES)


class _ClosesUnderReaders(Lender):
    kind = ClosesUnderReaders


class _ConfirmsLateReads(Lender):
    kind = ConfirmsLateReads


class ClosesUnderReadersMachine(KeptMachine):
    lender = _ClosesUnderReaders


class ConfirmsLateReadsMachine(KeptMachine):
    lender = _ConfirmsLateReads


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "machine", [ClosesUnderReadersMachine, ConfirmsLateReadsMachine]
)
def test_planted_defects_are_found(machine: type[KeptMachine]) -> None:
    with pytest.raises(Violation):
        run_state_machine_as_test(machine, settings=SEARCH)
