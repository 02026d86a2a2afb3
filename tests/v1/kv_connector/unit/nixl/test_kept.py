# SPDX-License-Identifier: Apache-2.0
"""Kept KV on one rank: who may read it, until when, and when it is let go."""

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff import kept as module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    Send,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import (
    KeptTable,
    is_kept,
    new_name,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    unpack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Cancelled,
    LeaseGranted,
    LeaseRequest,
    Message,
    ReadConfirmed,
    ReadDone,
    Refused,
    Want,
)

BLOCK = 4
LEASE = 10.0
TOKENS = 10
GENERATION = 3
BLOCKS = (7, 5, 9)
P, Q = AgentName("p"), AgentName("q")
R, S = RegistrationId("r"), RegistrationId("s")
NAME = TransferId("kept-0")
ALL = Want(TOKENS, 0, TOKENS, b"")


class Rank:
    """One rank's table, and one entry in it."""

    def __init__(self) -> None:
        self.table = KeptTable(LEASE, BLOCK)
        self.table.keep(self.offer(NAME), 0.0)

    @staticmethod
    def offer(name: TransferId, generation: int = GENERATION) -> Offer:
        blocks = np.array(BLOCKS, dtype=np.int32)
        return Offer(name, generation, TOKENS, b"", (blocks,))

    def ask(
        self,
        now: float = 0.0,
        registration_id: RegistrationId = R,
        peer: AgentName = P,
        want: Want = ALL,
        name: TransferId = NAME,
    ) -> list[Action]:
        request = LeaseRequest(name, registration_id, want)
        return self.table.lease_request(peer, request, now)

    def done(
        self,
        now: float = 0.0,
        registration_id: RegistrationId = R,
        peer: AgentName = P,
        ok: bool = True,
        generation: int = GENERATION,
        name: TransferId = NAME,
        blocks: tuple[int, ...] = BLOCKS,
    ) -> list[Action]:
        read = blocks_digest([blocks])
        message = ReadDone(registration_id, name, generation, ok, ALL, read)
        return self.table.read_done(peer, message, now)

    def idle(self) -> bool:
        return not any(self.table.sizes().values())


@pytest.fixture
def rank() -> Rank:
    return Rank()


def _said(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def _closed(actions: list[Action]) -> list[SenderClosed]:
    return [
        action.event
        for action in actions
        if isinstance(action, Report) and isinstance(action.event, SenderClosed)
    ]


def _granted(actions: list[Action]) -> LeaseGranted:
    (message,) = _said(actions)
    assert isinstance(message, LeaseGranted)
    return message


def _refusal(actions: list[Action]) -> str:
    (message,) = _said(actions)
    assert isinstance(message, Refused)
    return message.reason


def _counts(actions: list[Action]) -> bool:
    message = _said(actions)[0]
    assert isinstance(message, ReadConfirmed)
    return message.ok


def test_names_are_random_and_known_for_what_they_are() -> None:
    names = {new_name() for _ in range(50)}
    assert len(names) == 50
    assert all(is_kept(name) and len(name) >= 32 for name in names)
    assert not is_kept(TransferId("0" * 32))


def test_a_lease_names_the_blocks_that_are_wanted(rank: Rank) -> None:
    granted = _granted(rank.ask(want=Want(TOKENS, 4, 6, b"")))
    assert (granted.generation, granted.seconds) == (GENERATION, LEASE)
    assert [unpack_blocks(group).tolist() for group in granted.blocks] == [[5, 9]]
    assert rank.table.peers() == {P}
    assert rank.table.busy


def test_merely_keeping_asks_for_nothing(rank: Rank) -> None:
    assert rank.table.sizes() == {"kept": 1, "kept_leases": 0}
    assert not rank.table.busy
    assert rank.table.peers() == set()
    assert rank.table.tick(1e9) == []


def test_a_read_counts_and_the_kv_stays(rank: Rank) -> None:
    rank.ask()
    assert _counts(rank.done(now=LEASE))
    assert rank.table.sizes() == {"kept": 1, "kept_leases": 0}
    _granted(rank.ask(now=50, registration_id=S))
    assert _counts(rank.done(now=51, registration_id=S))


@pytest.mark.parametrize(
    ("peer", "ok", "generation", "name"),
    [
        (Q, True, GENERATION, NAME),
        (P, False, GENERATION, NAME),
        (P, True, GENERATION + 1, NAME),
        (P, True, GENERATION, TransferId("kept-1")),
    ],
)
def test_what_is_no_good_read_does_not_count(
    rank: Rank, peer: AgentName, ok: bool, generation: int, name: TransferId
) -> None:
    rank.ask()
    said = rank.done(peer=peer, ok=ok, generation=generation, name=name)
    assert not _counts(said)
    # Somebody else's word does not end a reader's lease.
    assert rank.table.busy is (peer == Q)


def test_a_late_read_does_not_count(rank: Rank) -> None:
    rank.ask(now=0)
    assert not _counts(rank.done(now=LEASE + 0.001))


def test_a_read_that_ends_after_the_tick_that_ended_its_lease(rank: Rank) -> None:
    rank.ask(now=0)
    assert rank.table.tick(LEASE) == []
    assert rank.table.tick(LEASE + 0.001) == []
    assert not rank.table.busy
    assert not _counts(rank.done(now=LEASE + 0.001))
    assert "has ended" in _refusal(rank.ask(now=LEASE + 1))


def test_a_reader_that_asks_again_may_read_longer(rank: Rank) -> None:
    rank.ask(now=0)
    _granted(rank.ask(now=8))
    assert rank.table.tick(15) == []
    assert rank.table.busy
    assert _counts(rank.done(now=18))


def test_a_repeated_end_is_answered_alike(rank: Rank) -> None:
    rank.ask()
    assert [_counts(rank.done()) for _ in range(3)] == [True] * 3
    rank.ask(registration_id=S)
    ends = [rank.done(registration_id=S, ok=False) for _ in range(3)]
    assert [_counts(end) for end in ends] == [False] * 3
    # The second word for one READ cannot make it better.
    assert not _counts(rank.done(registration_id=S, ok=True))


def test_a_request_that_comes_after_its_end_gets_no_lease(rank: Rank) -> None:
    rank.ask()
    rank.done()
    assert "has ended" in _refusal(rank.ask())
    assert not rank.table.busy


def test_without_readers_it_closes_at_once(rank: Rank) -> None:
    (closed,) = _closed(rank.table.retire(NAME, 7.0))
    assert (closed.transfer_id, closed.generation) == (NAME, GENERATION)
    assert (closed.reason, closed.tokens) == (CloseReason.RELEASED, 0)
    assert closed.seconds == 7.0
    assert rank.idle()
    assert rank.table.retire(NAME, 8.0) == []


def test_under_a_read_it_closes_when_that_ends(rank: Rank) -> None:
    rank.ask()
    assert rank.table.retire(NAME, 1.0) == []
    assert rank.table.retire(NAME, 1.0) == []
    actions = rank.done(now=2.0)
    assert _counts(actions)
    (closed,) = _closed(actions)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, TOKENS)
    assert rank.idle()


def test_what_is_retired_prolongs_no_lease_and_grants_none(rank: Rank) -> None:
    rank.ask(now=0)
    rank.table.retire(NAME, 1.0)
    assert rank.ask(now=5.0) == []
    assert "about to be released" in _refusal(rank.ask(now=5.0, registration_id=S))
    assert rank.table.tick(LEASE) == []
    (closed,) = _closed(rank.table.tick(LEASE + 0.001))
    assert closed.reason is CloseReason.RELEASED
    assert rank.idle()
    assert not _counts(rank.done(now=LEASE + 0.002))


def test_it_closes_when_the_last_of_several_reads_has_ended(rank: Rank) -> None:
    rank.ask(peer=P, registration_id=R)
    rank.ask(peer=Q, registration_id=S)
    rank.table.retire(NAME, 1.0)
    assert _closed(rank.done(peer=P, registration_id=R)) == []
    assert len(_closed(rank.done(peer=Q, registration_id=S))) == 1


def test_an_order_to_keep_that_is_still_on_its_way(rank: Rank) -> None:
    late = TransferId("kept-late")
    assert rank.ask(name=late) == []
    assert not rank.table.busy
    rank.table.keep(rank.offer(late, 4), 1.0)
    assert _granted(rank.ask(name=late, now=2.0)).generation == 4


def test_a_name_that_is_closed_is_refused(rank: Rank) -> None:
    rank.table.retire(NAME, 1.0)
    assert "kept no longer" in _refusal(rank.ask())
    assert "has ended" in _refusal(rank.ask())


def test_a_cancel_ends_the_lease(rank: Rank) -> None:
    rank.ask()
    rank.table.retire(NAME, 1.0)
    actions = rank.table.cancel(P, R, 2.0)
    assert _said(actions) == [Cancelled(R)]
    assert len(_closed(actions)) == 1
    assert _said(rank.table.cancel(P, R, 3.0)) == [Cancelled(R)]
    assert not _counts(rank.done())


def test_a_cancel_that_overtakes_its_request(rank: Rank) -> None:
    assert _said(rank.table.cancel(P, R, 0.0)) == [Cancelled(R)]
    assert "has ended" in _refusal(rank.ask())
    assert not rank.table.busy


def test_a_cancel_after_a_read_that_counts_changes_nothing(rank: Rank) -> None:
    rank.ask()
    rank.done()
    rank.table.cancel(P, R, 1.0)
    assert _counts(rank.done())


def test_nobody_cancels_or_uses_the_lease_of_another(rank: Rank) -> None:
    rank.ask(peer=P)
    assert _said(rank.table.cancel(Q, R, 0.0)) == [Cancelled(R)]
    assert "has ended" in _refusal(rank.ask(peer=Q))
    assert not _counts(rank.done(peer=Q))
    assert rank.table.peers() == {P}
    assert _counts(rank.done(peer=P))


def test_the_ranks_of_a_reader_read_under_one_registration(rank: Rank) -> None:
    for peer in (P, Q):
        _granted(rank.ask(peer=peer))
    assert rank.table.peers() == {P, Q}
    rank.table.retire(NAME, 1.0)
    assert _closed(rank.done(peer=Q, now=2.0)) == []
    assert _counts(rank.done(peer=Q, now=3.0))
    actions = rank.done(peer=P, now=4.0)
    assert _counts(actions)
    assert len(_closed(actions)) == 1
    assert rank.idle()


def test_one_registration_reads_one_entry(rank: Rank) -> None:
    other = TransferId("kept-1")
    rank.table.keep(rank.offer(other), 0.0)
    rank.ask()
    assert rank.ask(name=other) == []
    assert rank.table.sizes() == {"kept": 2, "kept_leases": 1}


def test_a_peer_that_is_gone_reads_no_more(rank: Rank) -> None:
    rank.ask(peer=P, registration_id=R)
    rank.ask(peer=Q, registration_id=S)
    rank.table.retire(NAME, 0.0)
    assert rank.table.peer_gone(P, 1.0) == []
    assert rank.table.peers() == {Q}
    assert not _counts(rank.done(peer=P, registration_id=R))
    assert len(_closed(rank.table.peer_gone(Q, 2.0))) == 1
    assert rank.idle()


@pytest.mark.parametrize(
    "want",
    [
        Want(TOKENS + 1, 0, TOKENS, b""),
        Want(TOKENS - 1, 0, 4, b""),
        Want(TOKENS, 0, 0, b""),
        Want(TOKENS, 0, TOKENS + 1, b""),
        Want(TOKENS, 2, 4, b""),
        Want(TOKENS, 8, 3, b""),
        Want(TOKENS, 2**31 - 4, 4, b""),
    ],
)
def test_what_is_no_part_of_it_is_refused(rank: Rank, want: Want) -> None:
    assert f"of the {TOKENS} kept" in _refusal(rank.ask(want=want))
    assert not rank.table.busy


def test_readers_are_bounded(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READERS", 3)
    for index in range(3):
        _granted(rank.ask(registration_id=RegistrationId(f"r{index}")))
    assert "too many" in _refusal(rank.ask(registration_id=S))
    assert rank.table.sizes()["kept_leases"] == 3


def test_memory_of_what_ended_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY", 4)
    rank = Rank()
    for index in range(10):
        rank.table.cancel(P, RegistrationId(f"r{index}"), 0.0)
    # What is forgotten did not count.
    assert not _counts(rank.done(registration_id=RegistrationId("r0")))
    assert "has ended" in _refusal(rank.ask(registration_id=RegistrationId("r9")))


def test_a_lease_whose_request_is_changed_stays_what_it_was(rank: Rank) -> None:
    first = _granted(rank.ask(want=Want(TOKENS, 4, 4, b"")))
    again = _granted(rank.ask(want=ALL))
    assert again.blocks == first.blocks
