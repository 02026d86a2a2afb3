# SPDX-License-Identifier: Apache-2.0
"""The decode side's table, case by case."""

from collections.abc import Callable
from itertools import permutations

import msgspec
import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff import attempts
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Event,
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Report,
    Send,
    StartRead,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    Hint,
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.watches import Watches
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    BlockArray,
    blocks_digest,
    pack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Cancel,
    Done,
    LeaseGranted,
    LeaseRequest,
    Message,
    ReadDone,
    Register,
    Want,
)

REPEAT = 2.0
TIMEOUT = 60.0
LEASE = 30.0
P, Q = AgentName("p"), AgentName("q")
T = TransferId("t")
R = RegistrationId("r")
WANT = Want(10, 4, 6, b"digest")
NOTHING = TransferSize()


def _ids(*blocks: int) -> tuple[BlockArray, ...]:
    return (np.array(blocks, dtype=np.int32),)


def _asked(mode: Mode, *sources: AgentName) -> ReceiverTable:
    table = ReceiverTable(REPEAT)
    table.receive(ReceiveRequest(R, T, WANT, _ids(3, 4), TIMEOUT, mode), 0)
    actions = table.connected(R, sources or (P,), 1)
    register = Register(T, R, WANT, (pack_blocks([3, 4]),))
    ask: Message = register if mode is Mode.PUSH else LeaseRequest(T, R, WANT)
    assert actions == [Send(source, ask) for source in sources or (P,)]
    return table


def _done(seq: int, total: int) -> Done:
    return Done(R, 0, True, seq, total, 50, 1)


def _events(actions: list[Action]) -> list[Event]:
    return [action.event for action in actions if isinstance(action, Report)]


def _sent(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def _failed(actions: list[Action]) -> ReceiveFailed:
    (event,) = _events(actions)
    assert isinstance(event, ReceiveFailed)
    return event


def _empty(table: ReceiverTable) -> bool:
    return not any(table.sizes().values())


# ---- push


def test_pieces_are_counted_in_whatever_order_they_come() -> None:
    table = _asked(Mode.PUSH)
    assert table.piece(P, _done(2, 3), 2) == []
    assert table.piece(P, _done(0, 3), 2) == []
    assert table.piece(P, _done(0, 3), 2) == []
    assert _events(table.piece(P, _done(1, 3), 3)) == [
        Received(R, 6, TransferSize(150, 3), 3.0)
    ]
    assert _empty(table)
    assert table.piece(P, _done(1, 3), 4) == []


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_chunks_are_counted_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    pieces = [(0, 0, 1), (1, 0, 2), (1, 1, 2), (2, 0, 1)]
    table = _asked(Mode.PUSH)
    for index in order:
        assert table.sizes()["receiver_attempts"] == 1
        chunk, seq, total = pieces[index]
        done = Done(R, chunk, chunk == 2, seq, total, 50, 1)
        actions = table.piece(P, done, 3)
    assert _events(actions) == [Received(R, 6, TransferSize(200, 4), 3.0)]
    assert _empty(table)


def test_counted_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_PIECES", 3)
    table = _asked(Mode.PUSH)
    for chunk in range(5):
        assert table.piece(P, Done(R, chunk, False, 0, 2, 50, 1), 2) == []
    (attempt,) = table._attempts.values()
    assert len(attempt.sources[P].pieces) == 3


def test_all_sources_must_be_done() -> None:
    table = _asked(Mode.PUSH, P, Q)
    assert table.piece(P, _done(0, 1), 2) == []
    assert _events(table.finished(Q, R, 3)) == [
        Received(R, 6, TransferSize(50, 1), 3.0)
    ]


def test_a_registration_is_said_again_until_it_is_done() -> None:
    table = _asked(Mode.PUSH, P, Q)
    table.accepted(P, R, 1)
    assert table.tick(1 + REPEAT / 2) == []
    table.piece(Q, _done(0, 1), 2)
    (again,) = table.tick(1 + REPEAT)
    assert again == Send(P, Register(T, R, WANT, (pack_blocks([3, 4]),)))


def test_a_refusal_by_the_only_source_leaves_nothing_to_fear() -> None:
    table = _asked(Mode.PUSH)
    actions = table.refused(P, R, "no", 2)
    assert _failed(actions) == ReceiveFailed(R, FailureKind.REFUSED, "no", quiet=True)
    assert _sent(actions) == []
    assert _empty(table)


def test_after_one_refusal_the_others_are_cancelled() -> None:
    table = _asked(Mode.PUSH, P, Q)
    actions = table.refused(P, R, "no", 2)
    assert not _failed(actions).quiet
    assert actions[0] == Send(Q, Cancel(R, T))
    assert _events(table.cancelled(Q, R)) == [ReceiveQuiet(R)]
    assert _empty(table)


@pytest.mark.parametrize("answer", ["cancelled", "refused", "pieces", "finished"])
def test_a_cancelled_attempt_is_quiet_when_its_writer_says_so(answer: str) -> None:
    table = _asked(Mode.PUSH)
    actions = table.cancel(R, "aborted", 2)
    assert _failed(actions).kind is FailureKind.CANCELLED
    assert _sent(actions) == [Cancel(R, T)]
    assert table.cancel(R, "aborted", 3) == []
    assert table.sizes() == {
        "receiver_attempts": 0,
        "receiver_quiescing": 1,
        "receiver_telling": 0,
    }
    assert _sent(table.tick(2 + REPEAT)) == [Cancel(R, T)]
    ends = {
        "cancelled": lambda: table.cancelled(P, R),
        "refused": lambda: table.refused(P, R, "no", 9),
        "pieces": lambda: table.piece(P, _done(0, 1), 9),
        "finished": lambda: table.finished(P, R, 9),
    }
    assert _events(ends[answer]()) == [ReceiveQuiet(R)]
    assert _empty(table)


def test_no_time_makes_blocks_safe() -> None:
    table = _asked(Mode.PUSH)
    assert _failed(table.tick(TIMEOUT + 1)).kind is FailureKind.TIMEOUT
    for later in range(2, 100):
        assert _events(table.tick(later * TIMEOUT)) == []
    assert table.sizes()["receiver_quiescing"] == 1


def test_a_lost_peer_is_no_proof_but_one_that_is_gone_is() -> None:
    table = _asked(Mode.PUSH)
    lost = _failed(table.peer_lost(P, "silent", 2))
    assert (lost.kind, lost.quiet) == (FailureKind.PEER_LOST, False)
    assert table.peer_lost(P, "silent", 3) == []
    assert table.peers() == {P}
    assert _events(table.peer_gone(P, "ended", 4)) == [ReceiveQuiet(R)]


def test_a_peer_that_is_gone_at_once_fails_quietly() -> None:
    table = _asked(Mode.PUSH)
    assert _failed(table.peer_gone(P, "ended", 2)).quiet


def test_a_peer_that_has_written_everything_needs_no_proof() -> None:
    table = _asked(Mode.PUSH, P, Q)
    table.piece(P, _done(0, 1), 2)
    assert _events(table.peer_gone(Q, "ended", 3)) == [
        ReceiveFailed(R, FailureKind.PEER_LOST, "ended", quiet=True)
    ]


def test_strangers_are_not_believed() -> None:
    table = _asked(Mode.PUSH)
    assert table.refused(Q, R, "no", 2) == []
    assert table.piece(Q, _done(0, 1), 2) == []
    assert table.finished(Q, R, 2) == []
    table.cancel(R, "aborted", 3)
    assert table.cancelled(Q, R) == []
    assert table.peer_gone(Q, "ended", 4) == []
    assert table.sizes()["receiver_quiescing"] == 1


def test_a_cancelled_answer_that_nobody_asked_for_changes_nothing() -> None:
    table = _asked(Mode.PUSH)
    assert table.cancelled(P, R) == []
    assert _events(table.piece(P, _done(0, 1), 2)) != []


# ---- before there is a connection


def test_an_engine_that_cannot_be_reached_has_written_nothing() -> None:
    table = ReceiverTable(REPEAT)
    table.receive(ReceiveRequest(R, T, WANT, (), TIMEOUT, Mode.PUSH), 0)
    assert _failed(table.unreachable(R, "no route", 1)) == ReceiveFailed(
        R, FailureKind.UNREACHABLE, "no route", quiet=True
    )
    assert table.connected(R, [P], 2) == []
    assert table.unreachable(R, "no route", 2) == []


def test_a_cancel_before_the_connection_is_quiet_at_once() -> None:
    table = ReceiverTable(REPEAT)
    table.receive(ReceiveRequest(R, T, WANT, (), TIMEOUT, Mode.PUSH), 0)
    assert _failed(table.cancel(R, "aborted", 1)).quiet
    assert table.connected(R, [P], 2) == []
    assert _events(table.cancel(R, "aborted", 3)) == [ReceiveQuiet(R)]


def test_a_connection_has_the_same_deadline() -> None:
    table = ReceiverTable(REPEAT)
    table.receive(ReceiveRequest(R, T, WANT, (), TIMEOUT, Mode.PUSH), 0)
    assert table.tick(TIMEOUT) == []
    assert _failed(table.tick(TIMEOUT + 1)).quiet


# ---- pull


def _grant(generation: int = 5, blocks: tuple[int, ...] = (8, 9)) -> LeaseGranted:
    return LeaseGranted(R, generation, LEASE, (pack_blocks(blocks),))


def _read_done(ok: bool, generation: int = 5, *blocks: int) -> ReadDone:
    return ReadDone(R, T, generation, ok, WANT, blocks_digest([blocks or (8, 9)]))


def _reading() -> ReceiverTable:
    table = _asked(Mode.PULL)
    (read,) = table.granted(P, _grant(), 2)
    assert isinstance(read, StartRead)
    assert [b.tolist() for b in read.local_blocks] == [[3, 4]]
    assert [b.tolist() for b in read.remote_blocks] == [[8, 9]]
    return table


def test_a_read_counts_that_ends_within_its_lease() -> None:
    table = _reading()
    size = TransferSize(70, 2)
    told, report = table.read_ended(P, R, size, None, 1 + LEASE)
    assert told == Send(P, _read_done(ok=True))
    assert _events([report]) == [Received(R, 6, size, 1 + LEASE)]
    assert table.peers() == {P}
    assert not table.busy


@pytest.mark.parametrize("ok", [True, False])
def test_its_lender_is_told_until_it_confirms(ok: bool) -> None:
    table = _reading()
    table.read_ended(P, R, NOTHING, None, 3)
    assert table.sizes()["receiver_telling"] == 1
    assert _sent(table.tick(3 + REPEAT)) == [_read_done(ok=True)]
    assert table.granted(P, _grant(generation=9), 6) == []
    assert table.cancel(R, "aborted", 6) == [Report(ReceiveQuiet(R))]
    assert table.read_confirmed(P, R, ok, 6) == []
    assert _empty(table)


def _refuse(table: ReceiverTable) -> list[Action]:
    return table.refused(P, R, "gone", 5)


def _lose(table: ReceiverTable) -> list[Action]:
    return table.peer_lost(P, "silent", 5)


def _see_end(table: ReceiverTable) -> list[Action]:
    return table.peer_gone(P, "ended", 5)


def _wait(table: ReceiverTable) -> list[Action]:
    return table.tick(TIMEOUT + 1)


@pytest.mark.parametrize("end", [_refuse, _lose, _see_end, _wait])
def test_a_lender_that_confirms_nothing_is_not_told_for_ever(
    end: Callable[[ReceiverTable], list[Action]],
) -> None:
    table = _reading()
    table.read_ended(P, R, NOTHING, None, 3)
    assert end(table) == []
    assert _empty(table)


@pytest.mark.parametrize("seconds", [LEASE, float("nan"), -1.0])
def test_a_read_that_outlives_its_lease_counts_when_it_is_confirmed(
    seconds: float,
) -> None:
    table = _asked(Mode.PULL)
    table.granted(P, msgspec.structs.replace(_grant(), seconds=seconds), 2)
    size, late = TransferSize(70, 2), 1 + LEASE + 0.5
    assert table.read_ended(P, R, size, None, late) == [Send(P, _read_done(ok=True))]
    assert _sent(table.tick(late + REPEAT)) == [_read_done(ok=True)]
    assert _events(table.read_confirmed(P, R, True, late)) == [
        Received(R, 6, size, late)
    ]
    assert _empty(table)


def test_a_late_read_that_is_not_confirmed_fails() -> None:
    table = _reading()
    table.read_ended(P, R, NOTHING, None, 2 + LEASE)
    failed = _failed(table.read_confirmed(P, R, False, 3 + LEASE))
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, True)
    assert _empty(table)


def test_a_failed_read_is_told_to_the_lender() -> None:
    table = _reading()
    actions = table.read_ended(P, R, NOTHING, "broken", 3)
    assert _sent(actions)[0] == _read_done(ok=False)
    assert _failed(actions).kind is FailureKind.TRANSFER


def test_a_lease_in_use_is_renewed() -> None:
    table = _reading()
    assert _sent(table.tick(2 + REPEAT)) == [LeaseRequest(T, R, WANT)]
    assert table.granted(P, _grant(), 5) == []


def test_a_lease_on_other_kv_than_before_fails() -> None:
    table = _reading()
    failed = _failed(table.granted(P, _grant(generation=6), 3))
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, False)


@pytest.mark.parametrize(
    "grant",
    [
        _grant(blocks=(8,)),
        LeaseGranted(R, 5, 30.0, ()),
        LeaseGranted(R, 5, 30.0, (b"12345",)),
    ],
)
def test_a_lease_that_does_not_fit_fails(grant: LeaseGranted) -> None:
    table = _asked(Mode.PULL)
    failed = _failed(table.granted(P, grant, 2))
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, True)


def test_a_cancelled_reader_is_quiet_when_its_own_read_has_ended() -> None:
    table = _reading()
    assert not _failed(table.cancel(R, "aborted", 3)).quiet
    assert table.refused(P, R, "gone", 4) == []
    assert table.cancelled(P, R) == []
    assert table.read_confirmed(P, R, True, 4) == []
    actions = table.read_ended(P, R, NOTHING, None, 5)
    assert _sent(actions) == [_read_done(ok=False)]
    assert _events(actions) == [ReceiveQuiet(R)]


def test_a_cancelled_reader_without_a_read_is_quiet_at_once() -> None:
    table = _asked(Mode.PULL)
    actions = table.cancel(R, "aborted", 2)
    assert _failed(actions).quiet
    assert _sent(actions) == [Cancel(R, T)]
    assert table.granted(P, _grant(), 3) == []


def test_a_lost_lender_fails_the_read_which_must_still_end() -> None:
    table = _reading()
    assert not _failed(table.peer_lost(P, "silent", 3)).quiet
    assert _events(table.read_ended(P, R, NOTHING, "broken", 4)) == [ReceiveQuiet(R)]


def test_two_lenders_are_both_read_and_both_asked() -> None:
    table = _asked(Mode.PULL, P, Q)
    table.granted(P, _grant(), 2)
    assert _events(table.read_ended(P, R, NOTHING, None, 3)) == []
    assert table.read_confirmed(P, R, True, 4) == []
    table.granted(Q, _grant(generation=2), 5)
    assert table.peers() == {Q}
    assert _events(table.read_ended(Q, R, NOTHING, None, 6)) != []
    assert table.read_confirmed(Q, R, True, 7) == []
    assert _empty(table)


@pytest.mark.parametrize("mode", Mode)
def test_a_lender_or_writer_that_has_given_all_may_go(mode: Mode) -> None:
    table = _asked(mode, P, Q)
    if mode is Mode.PUSH:
        table.finished(P, R, 2)
    else:
        table.granted(P, _grant(), 2)
        table.read_ended(P, R, NOTHING, None, 3)
        table.read_confirmed(P, R, True, 4)
    assert table.peers() == {Q}
    assert table.peer_lost(P, "silent", 5) == []
    assert table.peer_gone(P, "ended", 6) == []
    assert _failed(table.peer_lost(Q, "silent", 7)).quiet is (mode is Mode.PULL)


@pytest.mark.parametrize("mode", Mode)
def test_one_that_refuses_ends_it_for_all(mode: Mode) -> None:
    table = _asked(mode, P, Q)
    actions = table.refused(P, R, "no", 2)
    assert not isinstance(_failed(actions), Received)
    # The other is told, and said to be quiet by nobody but itself.
    assert [a.peer for a in actions if isinstance(a, Send)] == [Q]
    assert _failed(actions).quiet is (mode is Mode.PULL)
    if mode is Mode.PUSH:
        assert _events(table.cancelled(Q, R)) == [ReceiveQuiet(R)]
    assert not any(table.sizes().values())


def test_push_messages_do_nothing_in_pull_and_the_reverse() -> None:
    pull, push = _asked(Mode.PULL), _asked(Mode.PUSH)
    assert pull.finished(P, R, 2) == []
    assert push.granted(P, _grant(), 2) == []
    assert pull.sizes()["receiver_attempts"] == push.sizes()["receiver_attempts"] == 1


# ---- pull, by a hint


def _hinted(*sources: AgentName) -> ReceiverTable:
    sources = sources or (P,)
    table = ReceiverTable(REPEAT)
    hint = Hint(5, _ids(8, 9))
    table.receive(ReceiveRequest(R, T, WANT, _ids(3, 4), TIMEOUT, Mode.PULL, hint), 0)
    actions = table.connected(R, sources, 1)
    assert actions[: len(sources)] == [
        Send(source, LeaseRequest(T, R, WANT)) for source in sources
    ]
    reads = actions[len(sources) :]
    assert len(reads) == len(sources)
    for read, source in zip(reads, sources, strict=True):
        assert isinstance(read, StartRead)
        assert (read.peer, read.want) == (source, WANT)
        assert [b.tolist() for b in read.local_blocks] == [[3, 4]]
        assert [b.tolist() for b in read.remote_blocks] == [[8, 9]]
    return table


def test_a_read_by_a_hint_begins_with_the_question_and_counts_with_its_lease() -> None:
    table = _hinted()
    size = TransferSize(70, 2)
    actions = table.read_ended(P, R, size, None, 2)
    assert actions == [Send(P, _read_done(ok=True))]
    assert _events(table.granted(P, _grant(), 3)) == [Received(R, 6, size, 3.0)]
    assert table.read_confirmed(P, R, True, 4) == []
    assert _empty(table)


def test_a_read_by_a_hint_that_ended_too_late_waits_for_its_confirmation() -> None:
    table = _hinted()
    table.read_ended(P, R, NOTHING, None, 2 + LEASE)
    assert table.granted(P, _grant(), 3 + LEASE) == []
    assert _events(table.read_confirmed(P, R, True, 4 + LEASE)) != []
    assert _empty(table)


def test_a_hint_is_no_reason_to_read_twice() -> None:
    table = _hinted()
    assert table.accepted(P, R, 1) == []
    assert table.granted(P, _grant(), 2) == []
    assert table.granted(P, _grant(), 2) == []
    assert _events(table.read_ended(P, R, NOTHING, None, 3)) != []


def test_a_confirmation_does_for_a_grant_that_was_lost() -> None:
    table = _hinted()
    table.read_ended(P, R, NOTHING, None, 2)
    assert _sent(table.tick(2 + REPEAT)) == [_read_done(ok=True)]
    assert _events(table.read_confirmed(P, R, True, 5)) != []
    assert table.granted(P, _grant(), 6) == []


def test_neither_a_confirmation_nor_a_lease_is_the_end_of_a_read() -> None:
    table = _hinted()
    assert table.granted(P, _grant(), 2) == []
    assert table.read_confirmed(P, R, True, 2) == []
    assert table.sizes()["receiver_attempts"] == 1


def test_the_end_of_a_read_is_no_lease() -> None:
    table = _hinted()
    assert _events(table.read_ended(P, R, NOTHING, None, 3)) == []
    assert table.sizes()["receiver_attempts"] == 1


@pytest.mark.parametrize(
    "grant", [_grant(generation=6), _grant(blocks=(9, 8)), _grant(blocks=(8, 7))]
)
def test_a_hint_that_lies_fails_the_read_which_must_still_end(
    grant: LeaseGranted,
) -> None:
    table = _hinted()
    actions = table.granted(P, grant, 2)
    failed = _failed(actions)
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, False)
    assert "remote_block_ids" in failed.reason
    assert _sent(actions) == [Cancel(R, T)]
    assert table.granted(P, grant, 3) == []
    assert table.read_confirmed(P, R, True, 3) == []
    assert _events(table.read_ended(P, R, NOTHING, None, 4)) == [ReceiveQuiet(R)]
    assert _empty(table)


def test_a_hint_that_lies_is_found_out_after_the_read_too() -> None:
    table = _hinted()
    table.read_ended(P, R, NOTHING, None, 2)
    failed = _failed(table.granted(P, _grant(generation=6), 3))
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, True)


def test_a_read_by_a_hint_that_is_denied_fails() -> None:
    table = _hinted()
    table.read_ended(P, R, NOTHING, None, 2)
    failed = _failed(table.read_confirmed(P, R, False, 3))
    assert (failed.kind, failed.quiet) == (FailureKind.LEASE, True)
    assert _empty(table)


def test_blocks_that_cannot_be_read_are_named() -> None:
    table = _hinted()
    reason = "remote block ids reach from 8 to 9, that side has 4 blocks"
    actions = table.read_ended(P, R, NOTHING, reason, 1)
    failed = _failed(actions)
    assert (failed.kind, failed.quiet) == (FailureKind.TRANSFER, True)
    assert failed.reason == f"remote_block_ids of kv_transfer_params: {reason}"
    assert _sent(actions) == [_read_done(ok=False), Cancel(R, T)]


def test_a_refused_hint_waits_for_its_read() -> None:
    table = _hinted()
    assert not _failed(table.refused(P, R, "no such hand-off", 2)).quiet
    assert _events(table.read_ended(P, R, NOTHING, None, 3)) == [ReceiveQuiet(R)]


def test_a_cancelled_read_by_a_hint_is_quiet_when_it_has_ended() -> None:
    table = _hinted()
    actions = table.cancel(R, "aborted", 2)
    assert not _failed(actions).quiet
    assert _sent(actions) == [Cancel(R, T)]
    actions = table.read_ended(P, R, NOTHING, None, 3)
    assert _sent(actions) == [_read_done(ok=False)]
    assert _events(actions) == [ReceiveQuiet(R)]


def test_all_lenders_must_lease_or_confirm_what_a_hint_names() -> None:
    table = _hinted(P, Q)
    table.read_ended(P, R, NOTHING, None, 2)
    assert table.read_confirmed(P, R, True, 3) == []
    table.granted(Q, _grant(), 3)
    assert _sent(table.tick(1 + REPEAT)) == [LeaseRequest(T, R, WANT)]
    assert _events(table.read_ended(Q, R, NOTHING, None, 4)) != []
    assert _sent(table.tick(6 + REPEAT)) == [_read_done(ok=True)]
    assert table.read_confirmed(Q, R, True, 9) == []
    assert _empty(table)


def test_a_hint_is_of_no_use_to_what_is_written() -> None:
    table = ReceiverTable(REPEAT)
    hint = Hint(5, _ids(8, 9))
    table.receive(ReceiveRequest(R, T, WANT, _ids(3, 4), TIMEOUT, Mode.PUSH, hint), 0)
    assert [type(action) for action in table.connected(R, [P], 1)] == [Send]


# ---- watches


HERE, THERE = ("a", 1), ("b", 1)


def test_watches_are_renewed_by_address_at_their_interval() -> None:
    watches = Watches(10.0)
    watches.add(T, HERE)
    watches.add(TransferId("u"), HERE)
    watches.add(TransferId("v"), THERE)
    assert watches.due(0) == {HERE: (T, "u"), THERE: ("v",)}
    assert watches.due(9) == {}
    assert set(watches.due(10)) == {HERE, THERE}


def test_a_hand_off_is_watched_until_the_last_request_has_its_turn() -> None:
    watches = Watches(10.0)
    watches.add(T, HERE)
    watches.add(T, HERE)
    watches.drop(T)
    assert len(watches) == 1
    watches.drop(T)
    watches.drop(T)
    assert len(watches) == 0
    assert watches.due(100) == {}
