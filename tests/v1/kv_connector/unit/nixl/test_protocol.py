# SPDX-License-Identifier: Apache-2.0
"""Both sides of hand-offs under long random histories."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from v1.kv_connector.unit.nixl.faulty import (
    FreesOnTheLease,
    QuietOnTimeout,
    RetractsUnderWrites,
    ServesTheLastRankOnly,
    TrustsTheHint,
    TrustsTheLastPiece,
)
from v1.kv_connector.unit.nixl.ground_truth import POSITIONS, Violation
from v1.kv_connector.unit.nixl.simulation import Simulation
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import Hint
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)

EXAMPLES = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
SEARCH = settings(
    EXAMPLES, max_examples=5000, stateful_step_count=40, phases=[Phase.generate]
)

TRANSFERS = [TransferId(f"t{index}") for index in range(2)]
transfers = st.sampled_from(TRANSFERS)
some = st.integers(0, 10**6)
rarely_not = st.sampled_from([True, True, True, False])


def _alias(transfer_id: TransferId) -> TransferId:
    return TransferId(f"{transfer_id}-outside")


class HandoffMachine(RuleBasedStateMachine):
    """What a test may do next; the simulation itself checks what comes of it."""

    mode: ClassVar[Mode] = Mode.PUSH
    sender: ClassVar[type[SenderTable]] = SenderTable
    receiver: ClassVar[type[ReceiverTable]] = ReceiverTable
    calm: ClassVar[bool] = False

    @initialize(
        ranks=st.integers(1, 2),
        decode_ranks=st.lists(st.integers(1, 2), min_size=2, max_size=2),
        heads=st.integers(1, 2),
        pieces=st.integers(1, 3),
        parts=st.integers(1, 2),
    )
    def begin(
        self, ranks: int, decode_ranks: list[int], heads: int, pieces: int, parts: int
    ) -> None:
        self._begin(ranks, decode_ranks, heads, pieces, parts)

    def _begin(
        self, ranks: int, decode_ranks: list[int], heads: int, pieces: int, parts: int
    ) -> None:
        self.count = 0
        self.sim = Simulation(
            self.mode,
            prefill_ranks=ranks,
            decode_ranks=decode_ranks,
            heads=heads,
            pieces=pieces,
            parts=parts,
            sender=self.sender,
            receiver=self.receiver,
        )

    # ---- what routers and engines do

    @precondition(lambda self: len(self.sim.prefills) < len(TRANSFERS))
    @rule(receivers=st.sampled_from([None, 1, 2, 3]), pick=some)
    def expect(self, receivers: int | None, pick: int) -> None:
        missing = [name for name in TRANSFERS if name not in self.sim.prefills]
        transfer_id = missing[pick % len(missing)]
        self.sim.expect(transfer_id, receivers, (_alias(transfer_id),))

    @rule(
        pick=some,
        transfer_id=transfers,
        first=st.integers(0, POSITIONS - 1),
        by_alias=st.booleans(),
        connects=rarely_not,
    )
    def start(
        self,
        pick: int,
        transfer_id: TransferId,
        first: int,
        by_alias: bool,
        connects: bool,
    ) -> None:
        called = _alias(transfer_id) if by_alias else None
        self._start(pick, transfer_id, first, called, connects)

    def _start(
        self,
        pick: int,
        transfer_id: TransferId,
        first: int,
        called: TransferId | None,
        connects: bool,
        hint: Hint | None = None,
    ) -> None:
        decodes = list(self.sim.layout.decode)
        registration_id = RegistrationId(f"r{self.count}")
        self.count += 1
        decode = decodes[pick % len(decodes)]
        started = self.sim.start(
            decode, registration_id, transfer_id, first, called, hint
        )
        if started and connects:
            self.sim.connect(registration_id)

    @precondition(lambda self: self.sim.attempts and not self.calm)
    @rule(pick=some)
    def cancel(self, pick: int) -> None:
        known = [
            key
            for key, attempt in self.sim.attempts.items()
            if not self.sim.dead.intersection(attempt.ranks)
        ]
        if known:
            self.sim.cancel(known[-1 - pick % min(3, len(known))])

    # ---- what goes on

    @rule(picks=st.lists(some, min_size=1, max_size=6))
    def progress(self, picks: list[int]) -> None:
        for pick in picks:
            self._take_one(list(self._moves()), pick)

    @rule(count=st.integers(1, 6))
    def orderly_progress(self, count: int) -> None:
        for _ in range(count):
            self._take_one(list(self._moves()), 0)

    @precondition(lambda self: not self.calm)
    @rule(pick=some)
    def trouble(self, pick: int) -> None:
        self._take_one([*self._trouble(), *self._ends()], pick)

    @precondition(lambda self: not self.calm)
    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.sim.advance(seconds)
        self.sim.tick()

    @staticmethod
    def _take_one(choices: list[Callable[[], object]], pick: int) -> None:
        if choices:
            choices[pick % len(choices)]()

    def _moves(self) -> Iterator[Callable[[], object]]:
        sim = self.sim
        for transfer_id, prefill in sim.prefills.items():
            if prefill.computing:
                yield partial(sim.offer, transfer_id)
                if sim.mode is Mode.PUSH:
                    yield partial(sim.offer_chunk, transfer_id)
        for index in range(len(sim.network)):
            yield partial(sim.deliver, index)
        for index, write in enumerate(sim.writes):
            if write.unposted:
                yield partial(sim.post, index)
            for which in range(len(write.posted)):
                yield partial(sim.land, index, which)
        for index in range(len(sim.reads)):
            yield partial(sim.end_read, index)

    def _trouble(self) -> Iterator[Callable[[], object]]:
        sim = self.sim
        for index in range(len(sim.network)):
            yield partial(sim.lose, index)
            yield partial(sim.repeat, index)
        for index in range(len(sim.writes)):
            yield partial(sim.break_write, index)
        for index in range(len(sim.reads)):
            yield partial(sim.end_read, index, ok=False)
        for transfer_id, prefill in sim.prefills.items():
            yield partial(sim.withdraw, transfer_id)
            if prefill.computing and prefill.blocks:
                yield partial(sim.preempt, transfer_id)
        for registration_id, attempt in sim.attempts.items():
            for rank, part in attempt.ranks.items():
                if part.connecting:
                    yield partial(sim.connect_rank, registration_id, rank)
                if part.connecting and not part.over:
                    yield partial(sim.unreachable, registration_id, rank)
            for rank in attempt.to_cancel:
                yield partial(sim.give_up, registration_id, rank)
        decode = next(iter(sim.layout.decode))
        for transfer_id in TRANSFERS:
            yield partial(sim.renew, decode, transfer_id)
            for receivers in range(2):
                yield partial(sim.not_needed, decode, transfer_id, receivers)

    def _ends(self) -> Iterator[Callable[[], object]]:
        sim = self.sim
        sides = (list(sim.senders), list(sim.receivers))
        for owners, peers in (sides, sides[::-1]):
            for owner in owners:
                if owner in sim.dead:
                    continue
                for peer in peers:
                    if peer in sim.dead:
                        yield partial(sim.prove, owner, peer)
                    yield partial(sim.give_up_on, owner, peer)
                yield partial(sim.die, owner)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.settle(proofs=False)
        if self.sim.dead:
            self.sim.settle()
        self.sim.check_over()


class PullMachine(HandoffMachine):
    mode = Mode.PULL

    @precondition(lambda self: self.sim.told)
    @rule(
        pick=some,
        first=st.integers(0, POSITIONS - 1),
        kind=st.sampled_from(["told", "told", "lie", "guess"]),
    )
    def start_by_a_hint(self, pick: int, first: int, kind: str) -> None:
        told = list(self.sim.told)
        transfer_id = told[pick % len(told)]
        hint = self.sim.hint(transfer_id, kind)
        self._start(pick, transfer_id, first, None, True, hint)


class CalmMachine(HandoffMachine):
    """Nothing goes wrong, so that all that is asked for must come."""

    calm = True


class CalmPullMachine(CalmMachine):
    mode = Mode.PULL


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "machine", [HandoffMachine, PullMachine, CalmMachine, CalmPullMachine]
)
def test_random_histories(machine: type[HandoffMachine]) -> None:
    run_state_machine_as_test(machine, settings=EXAMPLES)


def test_no_time_takes_the_place_of_a_proof() -> None:
    sim = Simulation(Mode.PUSH)
    prefill, decode = AgentName("P0"), AgentName("D0")
    sim.expect(TRANSFERS[0], 1)
    sim.start(decode, RegistrationId("r"), TRANSFERS[0])
    sim.connect(RegistrationId("r"))
    sim.deliver(0)
    sim.die(prefill)
    sim.give_up_on(decode, prefill)
    for _ in range(10):
        sim.settle(proofs=False)
        with pytest.raises(Violation, match=r"'D0\.receiver_quiescing': 1"):
            sim.check_over()
    sim.settle()
    sim.check_over()


class SmallMachine(HandoffMachine):
    """Decode engines of one rank, so that a search goes deeper."""

    @initialize(
        ranks=st.integers(1, 2), pieces=st.integers(1, 3), parts=st.integers(1, 2)
    )
    def begin(self, ranks: int, pieces: int, parts: int) -> None:
        self._begin(ranks, [1, 1], 2, pieces, parts)


class FreesOnTheLeaseMachine(SmallMachine):
    sender = FreesOnTheLease


class QuietOnTimeoutMachine(SmallMachine):
    receiver = QuietOnTimeout


class TrustsTheLastPieceMachine(SmallMachine):
    receiver = TrustsTheLastPiece


class RetractsUnderWritesMachine(SmallMachine):
    sender = RetractsUnderWrites

    @precondition(lambda self: self.sim.writes)
    @rule(pick=some)
    def preempt(self, pick: int) -> None:
        preempted: list[Callable[[], object]] = [
            partial(self.sim.preempt, transfer_id)
            for transfer_id, prefill in self.sim.prefills.items()
            if prefill.computing and prefill.blocks
        ]
        self._take_one(preempted, pick)


class ServesTheLastRankOnlyMachine(HandoffMachine):
    sender = ServesTheLastRankOnly


class TrustsTheHintMachine(PullMachine):
    receiver = TrustsTheHint


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "machine",
    [
        TrustsTheHintMachine,
        FreesOnTheLeaseMachine,
        QuietOnTimeoutMachine,
        TrustsTheLastPieceMachine,
        RetractsUnderWritesMachine,
        ServesTheLastRankOnlyMachine,
    ],
)
def test_planted_defects_are_found(machine: type[HandoffMachine]) -> None:
    # Those that few histories show are left to the search of all short ones.
    with pytest.raises(Violation):
        run_state_machine_as_test(machine, settings=SEARCH)
