# SPDX-License-Identifier: Apache-2.0
"""The prefill side's table, case by case."""

import msgspec
import pytest

from v1.kv_connector.unit.nixl.sender_side import (
    LEASE,
    MOVED,
    D,
    E,
    R,
    S,
    T,
    closings,
    new_table,
    offered,
    refusal,
    registration,
    sent,
    wanted,
    written,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    StartWrite,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    unpack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancelled,
    Finished,
    LeaseGranted,
    LeaseRequest,
    ReadConfirmed,
    ReadDone,
    Refused,
)


def test_a_registration_before_its_request_is_served_when_the_offer_comes() -> None:
    table = new_table()
    assert sent(table.register(D, registration(), 0)) == [Accepted(R)]
    table.expect(T, 1, (), 1)
    (write,) = table.offer(offered(), 2)
    assert isinstance(write, StartWrite)
    assert (write.peer, write.registration_id) == (D, R)
    assert (write.chunk, write.last) == (0, True)
    assert write.local_blocks[0].tolist() == [7, 8, 9]
    assert write.remote_blocks[0].tolist() == [1, 2, 3]
    (closed,) = closings(written(table, 3))
    assert (closed.reason, closed.tokens, closed.size) == (
        CloseReason.SERVED,
        10,
        MOVED,
    )
    assert closed.seconds == 1
    assert not any(table.sizes().values())


def test_only_the_part_that_is_wanted_counts() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(want=wanted(first=8), blocks=(3,)), 0)
    (closed,) = closings(written(table, 1))
    assert closed.tokens == 2


def test_all_announced_receivers_are_served() -> None:
    table = new_table()
    table.expect(T, 2, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(R), 0)
    assert closings(written(table, 1)) == []
    table.not_needed(T, 1, 2)
    assert table.sizes()["sender_handoffs"] == 0
    assert "num_receivers" in refusal(table.register(D, registration(S), 3))


def test_all_receivers_may_be_released_at_once() -> None:
    table = new_table()
    table.expect(T, 5, (), 0)
    table.offer(offered(), 0)
    (closed,) = closings(table.not_needed(T, 0, 1))
    assert closed.reason is CloseReason.RELEASED


def test_what_is_not_needed_before_it_is_computed_closes_with_the_offer() -> None:
    table = new_table()
    table.not_needed(T, 1, 0)
    table.expect(T, 1, (), 0)
    assert len(closings(table.offer(offered(), 1))) == 1


def test_kv_that_nobody_asks_for_is_let_go_after_the_lease() -> None:
    table = new_table()
    table.expect(T, None, (), 0)
    table.offer(offered(), 1)
    assert closings(table.tick(1 + LEASE)) == []
    (closed,) = closings(table.tick(1.1 + LEASE))
    assert closed.reason is CloseReason.EXPIRED
    assert "kv_lease_duration" in refusal(table.register(D, registration(), 40))


def test_a_waiting_decode_request_keeps_kv_alive() -> None:
    table = new_table()
    table.expect(T, None, (), 0)
    table.offer(offered(), 0)
    table.renew([T], LEASE - 1)
    assert closings(table.tick(2 * LEASE - 2)) == []
    assert len(closings(table.tick(2 * LEASE))) == 1


def test_a_write_outlives_the_lease() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(), 0)
    assert table.tick(100 * LEASE) == []
    assert len(closings(written(table, 100 * LEASE))) == 1


def test_a_request_that_never_comes_is_refused_after_the_lease() -> None:
    table = new_table()
    table.register(D, registration(), 0)
    assert table.tick(LEASE) == []
    assert "no prefill request" in refusal(table.tick(LEASE + 0.1))
    assert not any(table.sizes().values())


def test_a_prefill_request_under_way_has_no_deadline_here() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.register(D, registration(), 0)
    assert table.tick(100 * LEASE) == []


def test_a_failed_write_is_told_and_remembered() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(), 0)
    assert sent(written(table, 1, "broken")) == [Refused(R, "broken")]
    assert sent(table.register(D, registration(), 2)) == [Refused(R, "broken")]


def test_a_cancel_is_answered_when_the_write_has_ended() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(), 0)
    assert table.cancel(D, R, T, 1) == []
    assert sent(written(table, 2)) == [Cancelled(R)]
    assert sent(table.cancel(D, R, T, 3)) == [Cancelled(R)]


def test_a_withdrawn_request_refuses_who_waits() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.register(D, registration(), 0)
    actions = table.withdraw(T, "aborted", 1)
    assert refusal(actions) == "aborted"
    assert closings(actions) == []
    assert not any(table.sizes().values())


def test_a_withdrawal_waits_for_the_write() -> None:
    table = new_table()
    table.expect(T, 2, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(), 0)
    assert table.withdraw(T, "aborted", 1) == []
    assert refusal(table.register(D, registration(S), 1)) == "aborted"
    (closed,) = closings(written(table, 2))
    assert (closed.reason, closed.tokens) == (CloseReason.WITHDRAWN, 10)


def test_an_offer_after_its_withdrawal_is_closed_at_once() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.withdraw(T, "aborted", 1)
    (closed,) = closings(table.offer(offered(), 2))
    assert (closed.reason, closed.generation) == (CloseReason.WITHDRAWN, 1)
    assert not any(table.sizes().values())


def test_a_lost_receiver_ends_its_claims_when_nothing_is_written() -> None:
    table = new_table()
    table.expect(T, 2, (), 0)
    table.register(E, registration(S), 0)
    table.offer(offered(), 0)
    table.register(D, registration(R), 0)
    assert table.peers() == {D, E}
    table.written(E, S, 0, MOVED, None, 1)
    assert table.peer_lost(D, 2) == []
    assert table.peers() == {D}
    actions = written(table, 3, "disconnected")
    assert sent(actions) == []
    (closed,) = closings(actions)
    assert closed.tokens == 10


def test_kv_whose_only_receiver_was_lost_was_not_served() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    table.register(D, registration(), 0)
    table.peer_lost(D, 1)
    (closed,) = closings(written(table, 2, "disconnected"))
    assert (closed.reason, closed.tokens) == (CloseReason.RELEASED, 0)


def test_a_lost_receiver_that_waits_is_forgotten() -> None:
    table = new_table()
    table.expect(T, 2, (), 0)
    table.register(D, registration(), 0)
    assert table.peer_lost(D, 1) == []
    assert table.sizes() == {"sender_handoffs": 1, "sender_claims": 0}
    assert "lost" in refusal(table.register(D, registration(), 2))


# ---- reading


def _leased(receivers: int = 1) -> SenderTable:
    table = new_table()
    table.expect(T, receivers, (), 0)
    table.offer(offered(generation=5), 0)
    (grant,) = sent(table.lease_request(D, LeaseRequest(T, R, wanted(first=4)), 0))
    assert isinstance(grant, LeaseGranted)
    assert (grant.generation, grant.seconds) == (5, LEASE)
    assert [unpack_blocks(b).tolist() for b in grant.blocks] == [[8, 9]]
    return table


def _read_done(
    generation: int = 5, ok: bool = True, blocks: tuple[int, ...] = (8, 9)
) -> ReadDone:
    return ReadDone(R, T, generation, ok, wanted(first=4), blocks_digest([blocks]))


def test_a_read_in_time_counts() -> None:
    table = _leased()
    actions = table.read_done(D, _read_done(), LEASE)
    assert sent(actions) == [ReadConfirmed(R, True)]
    (closed,) = closings(actions)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, 6)
    assert sent(table.read_done(D, _read_done(), 2 * LEASE)) == [ReadConfirmed(R, True)]


@pytest.mark.parametrize(
    ("done", "now"),
    [
        (_read_done(), LEASE + 1),
        (_read_done(4), 1.0),
        (_read_done(ok=False), 1.0),
        (_read_done(blocks=(8, 7)), 1.0),
        (_read_done(blocks=(9, 8)), 1.0),
        (_read_done(blocks=(8,)), 1.0),
    ],
)
def test_a_read_that_was_late_or_of_other_blocks_does_not_count(
    done: ReadDone, now: float
) -> None:
    table = _leased()
    actions = table.read_done(D, done, now)
    assert sent(actions) == [ReadConfirmed(R, False)]
    (closed,) = closings(actions)
    assert (closed.reason, closed.tokens) == (
        CloseReason.EXPIRED if now > LEASE else CloseReason.RELEASED,
        0,
    )
    assert not any(table.sizes().values())
    assert sent(table.read_done(D, _read_done(), now)) == [ReadConfirmed(R, False)]


def test_asking_again_renews_the_lease() -> None:
    table = _leased()
    table.lease_request(D, LeaseRequest(T, R, wanted(first=4)), LEASE - 1)
    assert table.tick(2 * LEASE - 2) == []
    assert sent(table.read_done(D, _read_done(), 2 * LEASE - 1)) == [
        ReadConfirmed(R, True)
    ]


def test_a_lease_that_ends_lets_the_kv_go() -> None:
    table = _leased()
    (closed,) = closings(table.tick(LEASE + 1))
    assert closed.reason is CloseReason.EXPIRED
    assert sent(table.read_done(D, _read_done(), LEASE + 2)) == [
        ReadConfirmed(R, False)
    ]


def test_a_withdrawal_waits_for_the_reader() -> None:
    table = _leased()
    assert table.withdraw(T, "aborted", 1) == []
    actions = table.read_done(D, _read_done(), 2)
    assert sent(actions) == [ReadConfirmed(R, True)]
    assert closings(actions)[0].reason is CloseReason.WITHDRAWN


def test_a_silent_reader_keeps_its_lease_and_one_that_is_gone_does_not() -> None:
    table = _leased()
    assert table.peer_lost(D, 1) == []
    assert table.peers() == {D}
    assert closings(table.peer_gone(D, 2))[0].reason is CloseReason.RELEASED
    table = _leased()
    table.peer_lost(D, 1)
    assert table.tick(LEASE) == []
    assert closings(table.tick(LEASE + 1))[0].reason is CloseReason.EXPIRED


def test_a_read_of_something_unknown_does_not_count() -> None:
    assert sent(new_table().read_done(D, _read_done(), 0)) == [ReadConfirmed(R, False)]


ASKED = LeaseRequest(T, R, wanted(first=4))


def test_a_read_that_ended_before_a_rank_knows_of_the_offer_counts_later() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    assert sent(table.lease_request(D, ASKED, 0)) == [Accepted(R)]
    assert table.read_done(D, _read_done(), 1) == []
    (grant,) = sent(table.offer(offered(generation=5), 2))
    assert isinstance(grant, LeaseGranted)
    actions = table.read_done(D, _read_done(), 3)
    assert sent(actions) == [ReadConfirmed(R, True)]
    assert closings(actions)[0].reason is CloseReason.SERVED


def test_a_reader_that_gives_up_before_the_offer_is_told_so() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.lease_request(D, ASKED, 0)
    assert sent(table.read_done(D, _read_done(ok=False), 1)) == [
        ReadConfirmed(R, False)
    ]


def test_word_of_a_read_does_for_a_request_that_was_lost() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(generation=5), 0)
    actions = table.read_done(D, _read_done(), 1)
    grant, confirmed = sent(actions)
    assert isinstance(grant, LeaseGranted)
    assert confirmed == ReadConfirmed(R, True)
    assert closings(actions)[0].reason is CloseReason.SERVED
    assert sent(table.lease_request(D, ASKED, 2)) == [Finished(R)]


def test_word_of_a_read_that_does_not_fit_is_refused() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(generation=5), 0)
    beyond = msgspec.structs.replace(_read_done(), want=wanted(first=3))
    refused, confirmed = sent(table.read_done(D, beyond, 1))
    assert isinstance(refused, Refused)
    assert confirmed == ReadConfirmed(R, False)


def test_an_engine_that_was_restarted_denies_a_read_at_once() -> None:
    table = new_table()
    assert sent(table.lease_request(D, ASKED, 0)) == [Accepted(R)]
    assert sent(table.read_done(D, _read_done(), 0)) == [ReadConfirmed(R, False)]
    assert "failed" in refusal(table.lease_request(D, ASKED, 1))
