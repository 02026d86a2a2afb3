# SPDX-License-Identifier: Apache-2.0
"""The prefill side's table, case by case."""

import msgspec
import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff import sender
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.book import HISTORY
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    pack_blocks,
    unpack_blocks,
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

BLOCK = 4
LEASE = 30.0
D, E = AgentName("d"), AgentName("e")
T, U = TransferId("t"), TransferId("u")
R, S = RegistrationId("r"), RegistrationId("s")
MOVED = TransferSize(100, 2)


def _table() -> SenderTable:
    return SenderTable(LEASE, BLOCK)


def _offer(transfer_id: TransferId = T, generation: int = 1) -> Offer:
    return Offer(
        transfer_id, generation, 10, b"digest", (np.array([7, 8, 9], dtype=np.int32),)
    )


def _want(first: int = 0, prompt: int = 10, digest: bytes = b"digest") -> Want:
    return Want(prompt, first, prompt - first, digest)


def _register(
    registration_id: RegistrationId = R,
    transfer_id: TransferId = T,
    want: Want | None = None,
    blocks: tuple[int, ...] = (1, 2, 3),
) -> Register:
    want = _want() if want is None else want
    return Register(transfer_id, registration_id, want, (pack_blocks(blocks),))


def _sent(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def _refusal(actions: list[Action]) -> str:
    (message,) = _sent(actions)
    assert isinstance(message, Refused)
    return message.reason


def _closed(actions: list[Action]) -> list[SenderClosed]:
    return [
        action.event
        for action in actions
        if isinstance(action, Report) and isinstance(action.event, SenderClosed)
    ]


def _written(
    table: SenderTable, now: float, failure: str | None = None
) -> list[Action]:
    return table.written(D, R, 0, MOVED, failure, now)


def test_a_registration_before_its_request_is_served_when_the_offer_comes() -> None:
    table = _table()
    assert _sent(table.register(D, _register(), 0)) == [Accepted(R)]
    table.expect(T, 1, (), 1)
    (write,) = table.offer(_offer(), 2)
    assert isinstance(write, StartWrite)
    assert (write.peer, write.registration_id) == (D, R)
    assert (write.chunk, write.last) == (0, True)
    assert write.local_blocks[0].tolist() == [7, 8, 9]
    assert write.remote_blocks[0].tolist() == [1, 2, 3]
    (closed,) = _closed(_written(table, 3))
    assert (closed.reason, closed.tokens, closed.size) == (
        CloseReason.SERVED,
        10,
        MOVED,
    )
    assert closed.seconds == 1
    assert not any(table.sizes().values())


def test_only_the_part_that_is_wanted_counts() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(want=_want(first=8), blocks=(3,)), 0)
    (closed,) = _closed(_written(table, 1))
    assert closed.tokens == 2


@pytest.mark.parametrize(
    ("want", "blocks", "said"),
    [
        (_want(prompt=11), (1, 2, 3), "11 tokens, the prefill prompt 10"),
        (_want(digest=b"other"), (1, 2, 3), "differ"),
        (_want(first=2), (1, 2, 3), "block-aligned"),
        (Want(10, 4, 7, b"digest"), (1, 2), "block-aligned"),
        (Want(10, 4, 0, b"digest"), (), "block-aligned"),
        (_want(), (1, 2), "2"),
        (_want(), (1, 2, 3, 4), "4"),
    ],
)
def test_what_does_not_fit_the_offer_is_refused(
    want: Want, blocks: tuple[int, ...], said: str
) -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    actions = table.register(D, _register(want=want, blocks=blocks), 0)
    assert said in _refusal(actions)
    assert len(_closed(actions)) == 1


def test_prompts_without_token_ids_are_not_compared() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    (write,) = table.register(D, _register(want=_want(digest=b"")), 0)
    assert isinstance(write, StartWrite)


def test_all_announced_receivers_are_served() -> None:
    table = _table()
    table.expect(T, 2, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(R), 0)
    assert _closed(_written(table, 1)) == []
    table.not_needed(T, 1, 2)
    assert table.sizes()["sender_handoffs"] == 0
    assert "num_receivers" in _refusal(table.register(D, _register(S), 3))


def test_all_receivers_may_be_released_at_once() -> None:
    table = _table()
    table.expect(T, 5, (), 0)
    table.offer(_offer(), 0)
    (closed,) = _closed(table.not_needed(T, 0, 1))
    assert closed.reason is CloseReason.RELEASED


def test_what_is_not_needed_before_it_is_computed_closes_with_the_offer() -> None:
    table = _table()
    table.not_needed(T, 1, 0)
    table.expect(T, 1, (), 0)
    assert len(_closed(table.offer(_offer(), 1))) == 1


def test_kv_that_nobody_asks_for_is_let_go_after_the_lease() -> None:
    table = _table()
    table.expect(T, None, (), 0)
    table.offer(_offer(), 1)
    assert _closed(table.tick(1 + LEASE)) == []
    (closed,) = _closed(table.tick(1.1 + LEASE))
    assert closed.reason is CloseReason.EXPIRED
    assert "kv_lease_duration" in _refusal(table.register(D, _register(), 40))


def test_a_waiting_decode_request_keeps_kv_alive() -> None:
    table = _table()
    table.expect(T, None, (), 0)
    table.offer(_offer(), 0)
    table.renew([T], LEASE - 1)
    assert _closed(table.tick(2 * LEASE - 2)) == []
    assert len(_closed(table.tick(2 * LEASE))) == 1


def test_a_write_outlives_the_lease() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(), 0)
    assert table.tick(100 * LEASE) == []
    assert len(_closed(_written(table, 100 * LEASE))) == 1


def test_a_request_that_never_comes_is_refused_after_the_lease() -> None:
    table = _table()
    table.register(D, _register(), 0)
    assert table.tick(LEASE) == []
    assert "no prefill request" in _refusal(table.tick(LEASE + 0.1))
    assert not any(table.sizes().values())


def test_a_prefill_request_under_way_has_no_deadline_here() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.register(D, _register(), 0)
    assert table.tick(100 * LEASE) == []


def test_a_repeated_registration_gets_the_same_answer() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.register(D, _register(), 0)
    assert _sent(table.register(D, _register(), 1)) == [Accepted(R)]
    table.offer(_offer(), 2)
    assert _sent(table.register(D, _register(), 3)) == [Accepted(R)]
    _written(table, 4)
    assert table.register(D, _register(), 5) == [Send(D, Finished(R))]


def test_a_failed_write_is_told_and_remembered() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(), 0)
    assert _sent(_written(table, 1, "broken")) == [Refused(R, "broken")]
    assert _sent(table.register(D, _register(), 2)) == [Refused(R, "broken")]


def test_a_cancel_is_answered_when_the_write_has_ended() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(), 0)
    assert table.cancel(D, R, T, 1) == []
    assert _sent(_written(table, 2)) == [Cancelled(R)]
    assert _sent(table.cancel(D, R, T, 3)) == [Cancelled(R)]


def test_a_cancel_that_overtakes_its_registration_wins() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    assert _sent(table.cancel(D, R, T, 0)) == [Cancelled(R)]
    assert _sent(table.register(D, _register(), 1)) == [Cancelled(R)]
    assert len(_closed(table.offer(_offer(), 2))) == 1


def test_a_refusal_holds_when_its_transfer_id_is_used_again() -> None:
    # The receiver gave its blocks away on the first answer.
    table = _table()
    table.withdraw(T, "aborted", 0)
    assert _refusal(table.register(D, _register(), 1)) == "aborted"
    table.expect(T, 1, (), 2)
    assert _refusal(table.register(D, _register(), 3)) == "aborted"
    assert table.offer(_offer(), 4) == []


def test_a_malformed_registration_is_refused_for_good() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    bad = Register(T, R, _want(), (b"123",))
    assert "int32" in _refusal(table.register(D, bad, 0))
    assert "int32" in _refusal(table.register(D, _register(), 1))


def test_a_claim_belongs_to_who_made_it() -> None:
    table = _table()
    table.expect(T, 2, (), 0)
    table.register(D, _register(), 0)
    assert _sent(table.cancel(E, R, T, 1)) == [Cancelled(R)]
    assert _sent(table.register(E, _register(), 1)) == [Cancelled(R)]
    (write,) = table.offer(_offer(), 2)
    assert isinstance(write, StartWrite)
    assert write.peer == D
    assert table.written(E, R, 0, MOVED, None, 3) == []
    (closed,) = _closed(_written(table, 3))
    assert closed.tokens == 10


def test_a_withdrawn_request_refuses_who_waits() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.register(D, _register(), 0)
    actions = table.withdraw(T, "aborted", 1)
    assert _refusal(actions) == "aborted"
    assert _closed(actions) == []
    assert not any(table.sizes().values())


def test_a_withdrawal_waits_for_the_write() -> None:
    table = _table()
    table.expect(T, 2, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(), 0)
    assert table.withdraw(T, "aborted", 1) == []
    assert _refusal(table.register(D, _register(S), 1)) == "aborted"
    (closed,) = _closed(_written(table, 2))
    assert (closed.reason, closed.tokens) == (CloseReason.WITHDRAWN, 10)


def test_an_offer_after_its_withdrawal_is_closed_at_once() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.withdraw(T, "aborted", 1)
    (closed,) = _closed(table.offer(_offer(), 2))
    assert (closed.reason, closed.generation) == (CloseReason.WITHDRAWN, 1)
    assert not any(table.sizes().values())


def test_a_lost_receiver_ends_its_claims_when_nothing_is_written() -> None:
    table = _table()
    table.expect(T, 2, (), 0)
    table.register(E, _register(S), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(R), 0)
    assert table.peers() == {D, E}
    table.written(E, S, 0, MOVED, None, 1)
    assert table.peer_lost(D, 2) == []
    assert table.peers() == {D}
    actions = _written(table, 3, "disconnected")
    assert _sent(actions) == []
    (closed,) = _closed(actions)
    assert closed.tokens == 10


def test_kv_whose_only_receiver_was_lost_was_not_served() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(), 0)
    table.register(D, _register(), 0)
    table.peer_lost(D, 1)
    (closed,) = _closed(_written(table, 2, "disconnected"))
    assert (closed.reason, closed.tokens) == (CloseReason.RELEASED, 0)


def test_a_lost_receiver_that_waits_is_forgotten() -> None:
    table = _table()
    table.expect(T, 2, (), 0)
    table.register(D, _register(), 0)
    assert table.peer_lost(D, 1) == []
    assert table.sizes() == {"sender_handoffs": 1, "sender_claims": 0}
    assert "lost" in _refusal(table.register(D, _register(), 2))


# ---- reading


def _leased(receivers: int = 1) -> SenderTable:
    table = _table()
    table.expect(T, receivers, (), 0)
    table.offer(_offer(generation=5), 0)
    (grant,) = _sent(table.lease_request(D, LeaseRequest(T, R, _want(first=4)), 0))
    assert isinstance(grant, LeaseGranted)
    assert (grant.generation, grant.seconds) == (5, LEASE)
    assert [unpack_blocks(b).tolist() for b in grant.blocks] == [[8, 9]]
    return table


def _read_done(
    generation: int = 5, ok: bool = True, blocks: tuple[int, ...] = (8, 9)
) -> ReadDone:
    return ReadDone(R, T, generation, ok, _want(first=4), blocks_digest([blocks]))


def test_a_read_in_time_counts() -> None:
    table = _leased()
    actions = table.read_done(D, _read_done(), LEASE)
    assert _sent(actions) == [ReadConfirmed(R, True)]
    (closed,) = _closed(actions)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, 6)
    assert _sent(table.read_done(D, _read_done(), 2 * LEASE)) == [
        ReadConfirmed(R, True)
    ]


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
    assert _sent(actions) == [ReadConfirmed(R, False)]
    (closed,) = _closed(actions)
    assert (closed.reason, closed.tokens) == (
        CloseReason.EXPIRED if now > LEASE else CloseReason.RELEASED,
        0,
    )
    assert not any(table.sizes().values())
    assert _sent(table.read_done(D, _read_done(), now)) == [ReadConfirmed(R, False)]


def test_asking_again_renews_the_lease() -> None:
    table = _leased()
    table.lease_request(D, LeaseRequest(T, R, _want(first=4)), LEASE - 1)
    assert table.tick(2 * LEASE - 2) == []
    assert _sent(table.read_done(D, _read_done(), 2 * LEASE - 1)) == [
        ReadConfirmed(R, True)
    ]


def test_a_lease_that_ends_lets_the_kv_go() -> None:
    table = _leased()
    (closed,) = _closed(table.tick(LEASE + 1))
    assert closed.reason is CloseReason.EXPIRED
    assert _sent(table.read_done(D, _read_done(), LEASE + 2)) == [
        ReadConfirmed(R, False)
    ]


def test_a_withdrawal_waits_for_the_reader() -> None:
    table = _leased()
    assert table.withdraw(T, "aborted", 1) == []
    actions = table.read_done(D, _read_done(), 2)
    assert _sent(actions) == [ReadConfirmed(R, True)]
    assert _closed(actions)[0].reason is CloseReason.WITHDRAWN


def test_a_silent_reader_keeps_its_lease_and_one_that_is_gone_does_not() -> None:
    table = _leased()
    assert table.peer_lost(D, 1) == []
    assert table.peers() == {D}
    assert _closed(table.peer_gone(D, 2))[0].reason is CloseReason.RELEASED
    table = _leased()
    table.peer_lost(D, 1)
    assert table.tick(LEASE) == []
    assert _closed(table.tick(LEASE + 1))[0].reason is CloseReason.EXPIRED


def test_a_read_of_something_unknown_does_not_count() -> None:
    assert _sent(_table().read_done(D, _read_done(), 0)) == [ReadConfirmed(R, False)]


ASKED = LeaseRequest(T, R, _want(first=4))


def test_a_read_that_ended_before_a_rank_knows_of_the_offer_counts_later() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    assert _sent(table.lease_request(D, ASKED, 0)) == [Accepted(R)]
    assert table.read_done(D, _read_done(), 1) == []
    (grant,) = _sent(table.offer(_offer(generation=5), 2))
    assert isinstance(grant, LeaseGranted)
    actions = table.read_done(D, _read_done(), 3)
    assert _sent(actions) == [ReadConfirmed(R, True)]
    assert _closed(actions)[0].reason is CloseReason.SERVED


def test_a_reader_that_gives_up_before_the_offer_is_told_so() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.lease_request(D, ASKED, 0)
    assert _sent(table.read_done(D, _read_done(ok=False), 1)) == [
        ReadConfirmed(R, False)
    ]


def test_word_of_a_read_does_for_a_request_that_was_lost() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(generation=5), 0)
    actions = table.read_done(D, _read_done(), 1)
    grant, confirmed = _sent(actions)
    assert isinstance(grant, LeaseGranted)
    assert confirmed == ReadConfirmed(R, True)
    assert _closed(actions)[0].reason is CloseReason.SERVED
    assert _sent(table.lease_request(D, ASKED, 2)) == [Finished(R)]


def test_word_of_a_read_that_does_not_fit_is_refused() -> None:
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(generation=5), 0)
    beyond = msgspec.structs.replace(_read_done(), want=_want(first=3))
    refused, confirmed = _sent(table.read_done(D, beyond, 1))
    assert isinstance(refused, Refused)
    assert confirmed == ReadConfirmed(R, False)


def test_an_engine_that_was_restarted_denies_a_read_at_once() -> None:
    table = _table()
    assert _sent(table.lease_request(D, ASKED, 0)) == [Accepted(R)]
    assert _sent(table.read_done(D, _read_done(), 0)) == [ReadConfirmed(R, False)]
    assert "failed" in _refusal(table.lease_request(D, ASKED, 1))


# ---- names


def test_a_request_is_found_under_all_its_names() -> None:
    table = _table()
    table.register(D, _register(R, U), 0)
    table.expect(T, 2, (U, T), 1)
    table.register(D, _register(S, T), 2)
    assert table.sizes() == {"sender_handoffs": 1, "sender_claims": 2}
    assert len(table.offer(_offer(), 3)) == 2
    table.written(D, R, 0, MOVED, None, 4)
    table.written(D, S, 0, MOVED, None, 4)
    assert not any(table.sizes().values())
    late = RegistrationId("late")
    assert "num_receivers" in _refusal(table.register(D, _register(late, U), 5))


def test_anothers_own_name_is_no_alias() -> None:
    # Clients choose request ids: one may equal another request's transfer_id.
    table = _table()
    table.expect(T, 1, (), 0)
    table.offer(_offer(T, 1), 0)
    table.expect(U, 1, (T,), 1)
    (write,) = table.register(D, _register(R, T), 2)
    assert isinstance(write, StartWrite)
    (closed,) = _closed(_written(table, 3))
    assert (closed.transfer_id, closed.generation) == (T, 1)


def test_an_own_name_goes_before_anothers_alias() -> None:
    table = _table()
    table.expect(T, 1, (U,), 0)
    table.expect(U, 1, (), 0)
    table.offer(_offer(T, 1), 1)
    table.offer(_offer(U, 2), 1)
    assert {
        closed.generation
        for name in (T, U)
        for closed in _closed(table.not_needed(name, 0, 2))
    } == {1, 2}
    assert not any(table.sizes().values())


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_HANDOFFS", 2)
    monkeypatch.setattr(sender, "MAX_CLAIMS_PER_HANDOFF", 1)
    table = _table()
    table.register(D, _register(R, T), 0)
    assert _refusal(table.register(D, _register(S, T), 0)) == "too many receivers"
    table.not_needed(U, 1, 0)
    third = TransferId("v")
    table.not_needed(third, 1, 0)
    assert table.sizes()["sender_handoffs"] == 2
    refused = table.register(D, _register(RegistrationId("q"), third), 0)
    assert _refusal(refused) == "too many hand-offs"


def test_claimed_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_CLAIMED_BLOCKS", 5)
    table = _table()
    table.register(D, _register(R, T), 0)
    refused = table.register(D, _register(S, U), 0)
    assert _refusal(refused) == "too many blocks are claimed"
    table.cancel(D, R, T, 1)
    third = RegistrationId("q")
    assert _sent(table.register(D, _register(third, U), 1)) == [Accepted(third)]


def test_old_outcomes_are_forgotten() -> None:
    table = SenderTable(LEASE, BLOCK)
    for index in range(HISTORY + 1):
        table.withdraw(TransferId(f"t{index}"), "aborted", 0)
    assert _sent(table.register(D, _register(R, TransferId("t0")), 1)) == [Accepted(R)]
    assert _refusal(table.register(D, _register(S, TransferId("t1")), 1)) == "aborted"
