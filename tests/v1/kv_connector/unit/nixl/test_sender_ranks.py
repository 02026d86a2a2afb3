# SPDX-License-Identifier: Apache-2.0
"""A prefill rank and decode engines of which several ranks ask it."""

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    Offer,
    Report,
    Send,
    SenderClosed,
    StartWrite,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    pack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancelled,
    Finished,
    LeaseGranted,
    LeaseRequest,
    Message,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Want,
)

LEASE = 30.0
D0, D1, E0 = AgentName("d0"), AgentName("d1"), AgentName("e0")
T = TransferId("t")
R, S = RegistrationId("r"), RegistrationId("s")
WANT = Want(10, 0, 10, b"digest")
SIZE = TransferSize(100, 2)


def _table(receivers: int | None = 1) -> SenderTable:
    table = SenderTable(LEASE, 4)
    table.expect(T, receivers, (), 0)
    return table


def _offer() -> Offer:
    return Offer(T, 1, 10, b"digest", (np.array([7, 8, 9], dtype=np.int32),))


def _register(registration_id: RegistrationId = R) -> Register:
    return Register(T, registration_id, WANT, (pack_blocks([1, 2, 3]),))


def _sent(actions: list[Action]) -> list[tuple[AgentName, Message]]:
    return [
        (action.peer, action.message) for action in actions if isinstance(action, Send)
    ]


def _closed(actions: list[Action]) -> list[SenderClosed]:
    return [
        action.event
        for action in actions
        if isinstance(action, Report) and isinstance(action.event, SenderClosed)
    ]


def _writes(actions: list[Action]) -> list[tuple[AgentName, RegistrationId]]:
    return [
        (action.peer, action.registration_id)
        for action in actions
        if isinstance(action, StartWrite)
    ]


def _written(
    table: SenderTable,
    peer: AgentName,
    registration_id: RegistrationId = R,
    failure: str | None = None,
) -> list[Action]:
    return table.written(peer, registration_id, 0, SIZE, failure, 5)


def test_a_receiver_is_served_when_all_its_ranks_are() -> None:
    table = _table()
    for rank in (D0, D1):
        assert _sent(table.register(rank, _register(), 0, 2)) == [(rank, Accepted(R))]
    assert _writes(table.offer(_offer(), 1)) == [(D0, R), (D1, R)]
    assert _closed(_written(table, D1)) == []
    (closed,) = _closed(_written(table, D0))
    assert closed.reason is CloseReason.SERVED
    assert closed.tokens == 10
    assert closed.size == SIZE + SIZE
    assert not any(table.sizes().values())


def test_the_first_rank_to_be_served_does_not_close_it_for_a_late_one() -> None:
    table = _table()
    table.register(D0, _register(), 0, 2)
    table.offer(_offer(), 1)
    assert _closed(_written(table, D0)) == []
    assert _writes(table.register(D1, _register(), 6, 2)) == [(D1, R)]
    assert len(_closed(_written(table, D1))) == 1


def test_reads_count_when_all_ranks_have_read() -> None:
    table = _table()
    table.offer(_offer(), 0)
    for rank in (D0, D1):
        ((to, granted),) = _sent(
            table.lease_request(rank, LeaseRequest(T, R, WANT), 1, 2)
        )
        assert to == rank
        assert isinstance(granted, LeaseGranted)
    done = ReadDone(R, T, 1, True, WANT, blocks_digest([[7, 8, 9]]))
    assert _closed(table.read_done(D0, done, 2)) == []
    actions = table.read_done(D1, done, 3)
    assert _sent(actions) == [(D1, ReadConfirmed(R, True))]
    (closed,) = _closed(actions)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, 10)
    # Said again, each is confirmed for itself.
    assert _sent(table.read_done(D0, done, 4)) == [(D0, ReadConfirmed(R, True))]
    assert _sent(table.read_done(E0, done, 4)) == [(E0, ReadConfirmed(R, False))]


def test_engines_of_different_sizes_share_a_hand_off() -> None:
    table = _table(2)
    table.offer(_offer(), 0)
    for rank, registration_id, readers in ((D0, R, 2), (E0, S, 1), (D1, R, 2)):
        table.register(rank, _register(registration_id), 1, readers)
    assert _closed(_written(table, E0, S)) == []
    assert _closed(_written(table, D0)) == []
    (closed,) = _closed(_written(table, D1))
    assert closed.tokens == 20


@pytest.mark.parametrize("readers", [2, 3, 7])
def test_what_all_ranks_do_not_need_is_one_receiver_less(readers: int) -> None:
    table = _table(2)
    table.offer(_offer(), 0)
    for rank in range(2 * readers):
        closed = _closed(table.not_needed(T, 1, 1, readers))
        assert len(closed) == (rank == 2 * readers - 1)


def test_one_rank_speaks_for_an_engine_that_needs_nothing_from_here() -> None:
    table = _table(2)
    table.offer(_offer(), 0)
    assert _closed(table.not_needed(T, 1, 1, 0)) == []
    table.register(E0, _register(S), 1, 1)
    assert len(_closed(_written(table, E0, S))) == 1


def test_a_rejected_request_releases_at_once_by_the_first_word() -> None:
    table = _table()
    table.offer(_offer(), 0)
    assert len(_closed(table.not_needed(T, 0, 1, 2))) == 1
    assert table.not_needed(T, 0, 1, 2) == []


def test_an_abort_reaches_the_ranks_in_any_state() -> None:
    # One rank is written to, one has not registered yet, whose abort comes first.
    table = _table()
    table.offer(_offer(), 0)
    table.register(D0, _register(), 1, 2)
    assert table.cancel(D0, R, T, 2, 2) == []
    assert _sent(table.cancel(D1, R, T, 2, 2)) == [(D1, Cancelled(R))]
    assert _sent(table.register(D1, _register(), 3, 2)) == [(D1, Cancelled(R))]
    actions = _written(table, D0)
    assert _sent(actions) == [(D0, Cancelled(R))]
    assert len(_closed(actions)) == 1


def test_what_is_said_twice_counts_once() -> None:
    table = _table()
    table.offer(_offer(), 0)
    table.register(D0, _register(), 1, 2)
    assert _closed(table.cancel(D1, R, T, 1, 2)) == []
    for _ in range(3):
        assert _sent(table.cancel(D1, R, T, 2, 2)) == [(D1, Cancelled(R))]
    assert table.sizes() == {"sender_handoffs": 1, "sender_claims": 1}
    assert len(_closed(_written(table, D0))) == 1
    assert _sent(table.register(D0, _register(), 6, 2)) == [(D0, Finished(R))]
    assert _sent(table.cancel(D0, R, T, 6, 2)) == [(D0, Cancelled(R))]


def test_outcomes_of_a_receivers_ranks_may_differ() -> None:
    table = _table()
    table.offer(_offer(), 0)
    table.register(D0, _register(), 1, 2)
    short = Register(T, R, WANT, (pack_blocks([1]),))
    ((to, refused),) = _sent(table.register(D1, short, 1, 2))
    assert to == D1
    assert isinstance(refused, Refused)
    actions = _written(table, D0, failure="broken")
    assert _sent(actions) == [(D0, Refused(R, "broken"))]
    (closed,) = _closed(actions)
    assert (closed.reason, closed.tokens) == (CloseReason.RELEASED, 0)


def test_a_registration_that_cannot_be_read_is_refused_to_its_rank_only() -> None:
    table = _table()
    table.register(D0, _register(), 0, 2)
    bad = Register(T, R, WANT, (b"123",))
    ((to, refused),) = _sent(table.register(D1, bad, 0, 2))
    assert to == D1
    assert isinstance(refused, Refused)
    assert _writes(table.offer(_offer(), 1)) == [(D0, R)]


def test_a_lost_rank_ends_for_itself() -> None:
    table = _table()
    for rank in (D0, D1):
        table.register(rank, _register(), 0, 2)
    table.peer_lost(D1, 1)
    assert _writes(table.offer(_offer(), 2)) == [(D0, R)]
    (closed,) = _closed(_written(table, D0))
    # Half a receiver was served.
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, 5)


def test_claims_that_were_early_by_an_alias_keep_their_shares() -> None:
    table = SenderTable(LEASE, 4)
    alias = TransferId("alias")
    for rank in (D0, D1):
        table.register(rank, Register(alias, R, WANT, _register().blocks), 0, 2)
    table.expect(T, 1, (alias,), 1)
    assert _writes(table.offer(_offer(), 2)) == [(D0, R), (D1, R)]
    assert _closed(_written(table, D0)) == []
    assert len(_closed(_written(table, D1))) == 1
