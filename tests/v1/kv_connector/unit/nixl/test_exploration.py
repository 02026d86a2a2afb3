# SPDX-License-Identifier: Apache-2.0
"""Small hand-offs in every order of events."""

import pytest

from v1.kv_connector.unit.nixl.explorer import Budget, Case, Planned, explore
from v1.kv_connector.unit.nixl.faulty import (
    ConfirmsAnyGeneration,
    ConfirmsAnyRead,
    ConfirmsOtherBlocks,
    ForgetsTheSilent,
    FreesOnTheLease,
    QuietOnTimeout,
    RetractsUnderWrites,
    ServesTheFirstRankOnly,
    TrustsTheGrant,
    TrustsTheHint,
    TrustsTheLastPiece,
    WithdrawsUnderReaders,
)
from v1.kv_connector.unit.nixl.ground_truth import Violation
from v1.kv_connector.unit.nixl.simulation import Simulation
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

D0, D1 = AgentName("D0"), AgentName("D1")
T0, T1 = TransferId("t0"), TransferId("t1")
ONE = (Planned(RegistrationId("r0"), T0, D0),)
TWICE = (*ONE, Planned(RegistrationId("r1"), T0, D1))
TWO = (*ONE, Planned(RegistrationId("r1"), T1, D0))

HINTED = (Planned(RegistrationId("r0"), T0, D0, "told"),)
LYING = (Planned(RegistrationId("r0"), T0, D0, "lie"),)
GUESSING = (Planned(RegistrationId("r0"), T0, D0, "guess"),)
HINTED_TWICE = (*HINTED, Planned(RegistrationId("r1"), T0, D1, "told"))
HINTED_LATER = (*HINTED, Planned(RegistrationId("r1"), T1, D0))

Plan = tuple[tuple[Planned, ...], dict[TransferId, int | None], Budget]

RANKS: dict[str, tuple[int, int, int]] = {
    "readers": (1, 2, 2),
    "readers-chunks": (1, 2, 2),
    "sources": (2, 1, 2),
    "unasked": (2, 1, 1),
    "pairs": (2, 2, 2),
}
"""Ranks of the prefill engine and of each decode engine, and heads; else 1, 1, 2."""

CASES: dict[str, Plan] = {
    "cancel": (ONE, {T0: 1}, Budget(cancels=1, ticks=3)),
    "repeat": (ONE, {T0: 1}, Budget(repeats=2, cancels=1, ticks=1)),
    "loss": (ONE, {T0: 1}, Budget(losses=2, cancels=1, ticks=2)),
    "withdraw": (ONE, {T0: 1}, Budget(withdrawals=1, cancels=1, repeats=1, ticks=1)),
    "break": (ONE, {T0: 1}, Budget(failures=1, cancels=1, losses=1, ticks=1)),
    "silence": (ONE, {T0: 1}, Budget(silences=1, cancels=1, ticks=2)),
    "death": (ONE, {T0: 1}, Budget(deaths=1, cancels=1, ticks=1)),
    "unexpected": (ONE, {}, Budget(cancels=1, repeats=1, losses=1, ticks=4)),
    "twice": (TWICE, {T0: 2}, Budget(cancels=1, ticks=1)),
    "twice-unannounced": (TWICE, {T0: None}, Budget(cancels=1, repeats=1)),
    "chunks": (ONE, {T0: 1}, Budget(chunks=2, cancels=1, failures=1, ticks=1)),
    "layers": (ONE, {T0: 1}, Budget(chunks=1, preemptions=1, cancels=1)),
    "preempt": (ONE, {T0: 1}, Budget(chunks=2, preemptions=1, cancels=1)),
    "preempt-withdraw": (
        ONE,
        {T0: 1},
        Budget(chunks=1, preemptions=1, withdrawals=1, silences=1),
    ),
    "chunks-twice": (TWICE, {T0: 2}, Budget(chunks=1, preemptions=1)),
    "readers": (ONE, {T0: 1}, Budget(cancels=1, repeats=1)),
    "readers-chunks": (ONE, {T0: 1}, Budget(chunks=1, preemptions=1)),
    "sources": (ONE, {T0: 1}, Budget(cancels=1, withdrawals=1)),
    "unasked": (ONE, {T0: 1}, Budget(cancels=1, repeats=1)),
    "pairs": (ONE, {T0: 1}, Budget(cancels=1)),
    "two": (TWO, {T0: 1, T1: None}, Budget(cancels=1, withdrawals=1)),
}

BY_A_HINT: dict[str, Plan] = {
    "cancel": (HINTED, {T0: 1}, Budget(cancels=1, ticks=3)),
    "repeat": (HINTED, {T0: 1}, Budget(repeats=2, cancels=1, ticks=1)),
    "loss": (HINTED, {T0: 1}, Budget(losses=2, cancels=1, ticks=2)),
    "withdraw": (HINTED, {T0: 1}, Budget(withdrawals=1, cancels=1, ticks=1)),
    "break": (HINTED, {T0: 1}, Budget(failures=1, cancels=1, losses=1, ticks=1)),
    "silence": (HINTED, {T0: 1}, Budget(silences=1, cancels=1, ticks=2)),
    "death": (HINTED, {T0: 1}, Budget(deaths=1, cancels=1, ticks=1)),
    "restart": (HINTED, {T0: 1}, Budget(restarts=1, losses=1, repeats=1, ticks=1)),
    "late": (HINTED, {T0: 1}, Budget(ticks=5)),
    "lie": (LYING, {T0: 1}, Budget(cancels=1, repeats=1, losses=1, ticks=1)),
    "guess": (GUESSING, {T0: 1}, Budget(cancels=1, repeats=1, losses=1, ticks=1)),
    "twice": (HINTED_TWICE, {T0: 2}, Budget(cancels=1, ticks=1)),
    "unannounced": (HINTED_TWICE, {T0: None}, Budget(repeats=1, ticks=1)),
    "reused": (HINTED_LATER, {T0: 1, T1: 1}, Budget(restarts=1, cancels=1)),
}
"""READs that begin before they are allowed."""


def _explore(
    mode: Mode, name: str, depth: int, settle_each: int, plans: dict[str, Plan] = CASES
) -> None:
    planned, transfers, budget = plans[name]
    ranks = RANKS if plans is CASES else {}
    prefill_ranks, decode_ranks, heads = ranks.get(name, (1, 1, 2))
    case = Case(
        Simulation(
            mode,
            prefill_ranks,
            decode_ranks=[decode_ranks] * len({plan.decode for plan in planned}),
            heads=heads,
            pieces=2 if planned is ONE and name not in RANKS else 1,
            parts=2 if name.startswith("layers") else 1,
        ),
        dict(transfers),
        list(planned),
        budget,
    )
    explored = explore(case, depth, settle_each)
    print(f"{mode} {name}, {depth} steps deep: {explored}")
    assert explored.complete
    assert explored.settled


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(60)
def test_no_order_breaks_a_promise(mode: Mode, name: str) -> None:
    _explore(mode, name, depth=9 if name in RANKS else 7, settle_each=10)


@pytest.mark.full
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(600)
def test_no_long_order_breaks_a_promise(mode: Mode, name: str) -> None:
    _explore(mode, name, depth=11, settle_each=10)


@pytest.mark.parametrize("name", BY_A_HINT)
@pytest.mark.timeout(60)
def test_no_order_lets_a_hint_break_a_promise(name: str) -> None:
    _explore(Mode.PULL, name, 8, 10, BY_A_HINT)


@pytest.mark.full
@pytest.mark.parametrize("name", BY_A_HINT)
@pytest.mark.timeout(600)
def test_no_long_order_lets_a_hint_break_a_promise(name: str) -> None:
    _explore(Mode.PULL, name, 12, 10, BY_A_HINT)


def _search(
    simulation: Simulation,
    budget: Budget,
    depth: int,
    planned: tuple[Planned, ...] = ONE,
) -> None:
    explore(Case(simulation, {T0: 1}, list(planned), budget), depth, settle_each=10**9)


@pytest.mark.timeout(120)
def test_a_sender_that_frees_on_the_lease_is_found() -> None:
    with pytest.raises(Violation, match=r"closes under a WRITE|written after its end"):
        _search(Simulation(Mode.PUSH, sender=FreesOnTheLease), Budget(ticks=4), 10)


@pytest.mark.timeout(120)
def test_a_receiver_that_is_quiet_on_a_timeout_is_found() -> None:
    with pytest.raises(Violation, match="ends under a WRITE"):
        _search(
            Simulation(Mode.PUSH, receiver=QuietOnTimeout),
            Budget(cancels=1, ticks=2),
            10,
        )


@pytest.mark.timeout(120)
def test_a_receiver_that_trusts_the_last_piece_is_found() -> None:
    with pytest.raises(Violation, match="is received with None"):
        _search(Simulation(Mode.PUSH, receiver=TrustsTheLastPiece), Budget(), 10)


@pytest.mark.timeout(120)
def test_a_sender_that_retracts_under_writes_is_found() -> None:
    with pytest.raises(Violation, match="closes under a WRITE"):
        _search(
            Simulation(Mode.PUSH, sender=RetractsUnderWrites),
            Budget(chunks=1, preemptions=1),
            10,
        )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", Mode)
def test_a_sender_that_closes_after_the_first_of_two_readers_is_found(
    mode: Mode,
) -> None:
    simulation = Simulation(
        mode, pieces=1, decode_ranks=[2], sender=ServesTheFirstRankOnly
    )
    case = Case(simulation, {T0: 1}, list(ONE), Budget())
    with pytest.raises(Violation, match="do not come, though nothing hinders it"):
        explore(case, 8, settle_each=1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", Mode)
def test_ranks_that_nobody_asks_and_nobody_tells_are_found(mode: Mode) -> None:
    simulation = Simulation(mode, prefill_ranks=2, pieces=1, heads=1)
    (asked,) = simulation.layout.sources[D0]
    (unasked,) = simulation.layout.idle[D0]
    assert {asked, unasked} == set(simulation.senders)
    simulation.layout.idle[D0] = ()
    case = Case(simulation, {T0: 1}, list(ONE), Budget())
    with pytest.raises(Violation, match="is served, and is not let go of"):
        explore(case, 8, settle_each=1)


@pytest.mark.timeout(120)
def test_a_sender_that_confirms_any_read_is_found() -> None:
    with pytest.raises(Violation, match="is received with None"):
        _search(Simulation(Mode.PULL, sender=ConfirmsAnyRead), Budget(ticks=4), 12)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("receiver", "planned"),
    [(TrustsTheHint, HINTED), (TrustsTheHint, GUESSING), (TrustsTheGrant, HINTED)],
)
def test_a_receiver_that_asks_for_no_confirmation_is_found(
    receiver: type[ReceiverTable], planned: tuple[Planned, ...]
) -> None:
    with pytest.raises(Violation, match=r"is received with|without lease"):
        _search(Simulation(Mode.PULL, receiver=receiver), Budget(ticks=4), 10, planned)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sender", "budget"),
    [
        (ForgetsTheSilent, Budget(silences=1)),
        (WithdrawsUnderReaders, Budget(withdrawals=1)),
    ],
)
def test_a_sender_that_takes_leases_back_is_found(
    sender: type[SenderTable], budget: Budget
) -> None:
    with pytest.raises(Violation, match="while r0 holds a lease"):
        _search(Simulation(Mode.PULL, sender=sender), budget, 8)


@pytest.mark.timeout(120)
def test_a_sender_that_confirms_other_blocks_is_found() -> None:
    with pytest.raises(Violation, match="is received with"):
        _search(Simulation(Mode.PULL, sender=ConfirmsOtherBlocks), Budget(), 10, LYING)


@pytest.mark.timeout(120)
def test_a_sender_that_confirms_any_generation_is_found() -> None:
    with pytest.raises(Violation, match="is received with None"):
        _search(
            Simulation(Mode.PULL, sender=ConfirmsAnyGeneration), Budget(), 10, GUESSING
        )
