# SPDX-License-Identifier: Apache-2.0
"""Kept KV and its readers in every order of events."""

import pytest

from v1.kv_connector.unit.nixl.explorer import Budget, Case, Planned, explore
from v1.kv_connector.unit.nixl.faulty import ClosesUnderReaders, ConfirmsLateReads
from v1.kv_connector.unit.nixl.ground_truth import Violation
from v1.kv_connector.unit.nixl.kept_simulation import KeptSimulation, Lender
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import Action
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)

P0, P1 = AgentName("D0"), AgentName("D1")
K0, K1 = TransferId("kept-0"), TransferId("kept-1")
ONE = (Planned(RegistrationId("r0"), K0, P0),)
TWO = (*ONE, Planned(RegistrationId("r1"), K0, P1))
BOTH = (*ONE, Planned(RegistrationId("r1"), K1, P0))

CASES: dict[str, tuple[int, tuple[Planned, ...], Budget]] = {
    "retire": (1, ONE, Budget(withdrawals=1, ticks=4)),
    "cancel": (1, ONE, Budget(withdrawals=1, cancels=1, ticks=2)),
    "repeat": (1, ONE, Budget(withdrawals=1, repeats=2, cancels=1)),
    "loss": (1, ONE, Budget(withdrawals=1, losses=2, ticks=2)),
    "break": (1, ONE, Budget(withdrawals=1, failures=1, repeats=1)),
    "silence": (1, ONE, Budget(withdrawals=1, silences=1, ticks=1)),
    "death": (1, ONE, Budget(withdrawals=1, deaths=1, ticks=1)),
    "two-ranks": (2, ONE, Budget(withdrawals=1, ticks=1)),
    "two-readers": (1, TWO, Budget(withdrawals=1, ticks=1)),
    "two-entries": (1, BOTH, Budget(withdrawals=2)),
}


def _told(
    ranks: int = 1,
    planned: tuple[Planned, ...] = ONE,
    lender: type[Lender] = Lender,
    kind: type[KeptSimulation] = KeptSimulation,
) -> KeptSimulation:
    """An entry that its ranks keep, and whose name is known."""
    readers = len({plan.decode for plan in planned})
    simulation = kind(ranks, readers, lender)
    simulation.expect(K0)
    for rank in simulation.senders:
        simulation.obey(rank)
    simulation.look_up(K0)
    return simulation


def _explore(simulation: KeptSimulation, name: str, depth: int) -> None:
    _, planned, budget = CASES[name]
    # What is kept later takes the blocks that the first leaves behind.
    later: dict[TransferId, int | None] = {K1: None}
    if not simulation.prefills:
        later = {K0: None, **later}
    explored = explore(Case(simulation, later, list(planned), budget), depth, 10)
    print(f"{name}, {depth} steps deep: {explored}")
    assert explored.complete
    assert explored.settled


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(120)
def test_no_order_breaks_a_promise(name: str) -> None:
    ranks, planned, _ = CASES[name]
    _explore(_told(ranks, planned), name, depth=8)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(900)
def test_no_long_order_breaks_a_promise(name: str) -> None:
    ranks, planned, _ = CASES[name]
    readers = len({plan.decode for plan in planned})
    _explore(_told(ranks, planned), name, depth=11)
    _explore(KeptSimulation(ranks, readers), name, depth=11)


# ---- planted defects


class _ClosesUnderReaders(Lender):
    kind = ClosesUnderReaders


class _ConfirmsLateReads(Lender):
    kind = ConfirmsLateReads


class _ForgetsTheSilent(Lender):
    """Takes a lease back from a reader of which nothing is heard."""

    def peer_lost(self, peer: AgentName, now: float) -> list[Action]:
        return self.kept.peer_gone(peer, now)


class _FreesWhatIsKnown(KeptSimulation):
    """A scheduler that asks no rank before it frees blocks."""

    def frees_at_once(self, transfer_id: TransferId) -> bool:
        return True


def _search(simulation: KeptSimulation, budget: Budget, depth: int) -> None:
    case = Case(simulation, {K1: None}, list(ONE), budget)
    explore(case, depth, settle_each=10**9)


@pytest.mark.timeout(120)
def test_a_table_that_closes_under_a_reader_is_found() -> None:
    with pytest.raises(Violation, match="holds a lease"):
        _search(_told(lender=_ClosesUnderReaders), Budget(withdrawals=1), 8)


@pytest.mark.timeout(120)
def test_a_table_that_forgets_the_silent_is_found() -> None:
    with pytest.raises(Violation, match="holds a lease"):
        _search(_told(lender=_ForgetsTheSilent), Budget(withdrawals=1, silences=1), 8)


@pytest.mark.timeout(120)
def test_a_table_that_confirms_late_reads_is_found() -> None:
    with pytest.raises(Violation, match="freed under it"):
        _search(_told(lender=_ConfirmsLateReads), Budget(withdrawals=1, ticks=4), 12)


@pytest.mark.timeout(120)
def test_a_scheduler_that_asks_no_rank_is_found() -> None:
    with pytest.raises(Violation, match=r"freed|is received with"):
        _search(_told(kind=_FreesWhatIsKnown), Budget(withdrawals=1), 9)
