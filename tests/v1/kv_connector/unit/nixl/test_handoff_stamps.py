# SPDX-License-Identifier: Apache-2.0
"""Which moments of a hand-off are stamped, on both sides and in both modes."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    Rank,
    offer,
    request,
    run,
)
from v1.kv_connector.unit.nixl.engine_side import LENGTH, allocate, finish, step
from v1.kv_connector.unit.nixl.engine_side import request as engine_request
from v1.kv_connector.unit.nixl.test_decode_side import Side as DecodeEngine
from v1.kv_connector.unit.nixl.test_prefill_side import Side as PrefillEngine
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    FailureKind,
    Offer,
    Received,
    ReceiveFailed,
    Report,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    Hint,
    ReceiveRequest,
)
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import PendingOffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import PrefillParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import (
    PHASES,
    Role,
    Stage,
    Stamps,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    pack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Done,
    LeaseGranted,
    LeaseRequest,
    ReadDone,
    Register,
    Want,
)

pytestmark = pytest.mark.timeout(90)

BLOCK = 4
P, Q, D = AgentName("p"), AgentName("q"), AgentName("d")
T, ALIAS = TransferId("t"), TransferId("alias")
R, S = RegistrationId("r"), RegistrationId("s")
WANT = Want(8, 0, 8, b"digest")
SIZE = TransferSize(100, 2)


def _blocks(*ids: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], ...]:
    return (np.array(ids, dtype=np.int32),)


def _chunk(first: int, last: int) -> Offer:
    blocks = _blocks(*range(10 + first, 10 + last))
    return Offer(T, 1, 8, b"digest", blocks, first, 8 - last * BLOCK)


def _register(name: RegistrationId = R, transfer_id: TransferId = T) -> Register:
    return Register(transfer_id, name, WANT, (pack_blocks([1, 2]),))


def _stamps(actions: Sequence[Action]) -> Stamps:
    (event,) = [action.event for action in actions if isinstance(action, Report)]
    assert isinstance(event, SenderClosed | Received | ReceiveFailed)
    return event.stamps


# ---- P's worker


def test_a_sender_stamps_its_chunks() -> None:
    table = SenderTable(30.0, BLOCK)
    table.expect(T, 1, (), 0)
    table.register(D, _register(), 1)
    table.offer(_chunk(0, 1), 2)
    table.written(D, R, 0, SIZE, None, 4, (2.5, 3.5))
    table.offer(_chunk(1, 2), 6, 5.75)
    stamps = _stamps(table.written(D, R, 1, SIZE, None, 8, (6.5, 7.5)))
    assert stamps.chunks == 2
    assert stamps.at == {
        Stage.REGISTERED: 1,
        Stage.FIRST_POSTED: 2.5,
        # When it was computed, not when that was heard of.
        Stage.PREFILL_ENDED: 5.75,
        Stage.LAST_POSTED: 6.5,
        Stage.WRITTEN: 7.5,
    }


def test_a_failed_write_moves_nothing() -> None:
    table = SenderTable(30.0, BLOCK)
    table.expect(T, 1, (), 0)
    table.register(D, _register(), 1)
    table.offer(_chunk(0, 2), 2)
    stamps = _stamps(table.written(D, R, 0, SIZE, "broken", 4, (2.5, 3.5)))
    assert stamps.chunks == 0
    assert stamps.at == {Stage.REGISTERED: 1, Stage.PREFILL_ENDED: 2}


def test_the_first_of_several_receivers_and_the_last_write_count() -> None:
    table = SenderTable(30.0, BLOCK)
    table.expect(T, 2, (), 0)
    table.register(D, _register(R), 1)
    table.offer(_chunk(0, 2), 2)
    table.register(D, _register(S), 3)
    table.written(D, S, 0, SIZE, None, 6, (4, 5))
    stamps = _stamps(table.written(D, R, 0, SIZE, None, 7, (2, 6.5)))
    assert stamps.at[Stage.REGISTERED] == 1
    assert (stamps.at[Stage.FIRST_POSTED], stamps.at[Stage.LAST_POSTED]) == (2, 4)
    assert stamps.at[Stage.WRITTEN] == 6.5


def test_a_claim_by_another_name_is_stamped_when_it_came() -> None:
    table = SenderTable(30.0, BLOCK)
    table.register(D, _register(transfer_id=ALIAS), 1)
    table.expect(T, 1, (ALIAS,), 5)
    table.offer(_chunk(0, 2), 6)
    stamps = _stamps(table.written(D, R, 0, SIZE, None, 8, (6, 7)))
    assert stamps.at[Stage.REGISTERED] == 1


def test_a_lender_stamps_the_lease() -> None:
    table = SenderTable(30.0, BLOCK)
    table.expect(T, 1, (), 0)
    table.offer(_chunk(0, 2), 1)
    table.lease_request(D, LeaseRequest(T, R, WANT), 2)
    # Said again, because the answer was lost.
    table.lease_request(D, LeaseRequest(T, R, WANT), 3)
    stamps = _stamps(
        table.read_done(
            D, ReadDone(R, T, 1, True, WANT, blocks_digest(_chunk(0, 2).blocks)), 4
        )
    )
    assert stamps.chunks == 1
    assert stamps.at == {
        Stage.PREFILL_ENDED: 1,
        Stage.REGISTERED: 2,
        Stage.FIRST_POSTED: 2,
        Stage.LAST_POSTED: 2,
        Stage.WRITTEN: 4,
    }


# ---- D's worker


def _asking(mode: Mode, *sources: AgentName) -> ReceiverTable:
    table = ReceiverTable(2.0)
    table.receive(ReceiveRequest(R, T, WANT, _blocks(1, 2), 60, mode), 0)
    table.connected(R, sources or (P,), 1)
    return table


def _done(chunk: int, seq: int = 0, total: int = 1) -> Done:
    return Done(R, chunk, chunk == 1, seq, total, 50, 1)


def test_a_receiver_stamps_what_comes() -> None:
    table = _asking(Mode.PUSH)
    table.accepted(P, R, 2)
    table.piece(P, _done(0), 3)
    table.piece(P, _done(1, 0, 2), 4)
    stamps = _stamps(table.piece(P, _done(1, 1, 2), 5))
    assert stamps.chunks == 2
    assert stamps.at == {
        Stage.ASKED: 1,
        Stage.ANSWERED: 2,
        Stage.FIRST_NOTIFICATION: 3,
        Stage.PREFILL_ENDED: 4,
        Stage.LAST_NOTIFICATION: 5,
    }


def test_kv_itself_is_an_answer() -> None:
    stamps = _stamps(_asking(Mode.PUSH).finished(P, R, 3))
    assert stamps.at == dict.fromkeys((Stage.ANSWERED, Stage.LAST_NOTIFICATION), 3) | {
        Stage.ASKED: 1
    }
    table = _asking(Mode.PUSH)
    table.piece(P, _done(0), 3)
    assert _stamps(table.piece(P, _done(1), 4)).at[Stage.ANSWERED] == 3


def test_a_prompt_is_computed_when_all_ranks_have_sent_of_their_last_chunk() -> None:
    table = _asking(Mode.PUSH, P, Q)
    table.piece(P, _done(0), 2)
    table.piece(P, _done(1), 3)
    table.piece(Q, _done(1), 5)
    stamps = _stamps(table.piece(Q, _done(0), 6))
    assert stamps.at[Stage.PREFILL_ENDED] == 5
    assert stamps.chunks == 4


def test_what_a_hint_names_is_computed_when_it_is_asked_for() -> None:
    table = ReceiverTable(2.0)
    hint = Hint(1, _blocks(5, 6))
    table.receive(ReceiveRequest(R, T, WANT, _blocks(1, 2), 60, Mode.PULL, hint), 0)
    table.connected(R, [P], 1)
    table.read_ended(P, R, SIZE, None, 2)
    granted = LeaseGranted(R, 1, 30.0, (pack_blocks([5, 6]),))
    stamps = _stamps(table.granted(P, granted, 3))
    assert stamps.chunks == 1
    assert stamps.at == {
        Stage.ASKED: 1,
        Stage.PREFILL_ENDED: 1,
        Stage.ANSWERED: 3,
        Stage.LAST_NOTIFICATION: 3,
    }


def test_a_reader_is_answered_by_a_lease() -> None:
    table = _asking(Mode.PULL)
    table.granted(P, LeaseGranted(R, 1, 30.0, (pack_blocks([5, 6]),)), 2)
    stamps = _stamps(table.read_ended(P, R, SIZE, None, 3))
    assert stamps.chunks == 1
    assert stamps.at == {
        Stage.ASKED: 1,
        Stage.ANSWERED: 2,
        Stage.PREFILL_ENDED: 2,
        Stage.LAST_NOTIFICATION: 3,
    }


def test_what_a_failed_attempt_has_come_to_is_told() -> None:
    table = _asking(Mode.PUSH)
    table.accepted(P, R, 2)
    stamps = _stamps(table.refused(P, R, "no", 3))
    assert stamps.at == {Stage.ASKED: 1, Stage.ANSWERED: 2}


# ---- two real ranks


@pytest.mark.parametrize("mode", Mode)
def test_two_ranks_stamp_all_that_workers_see(mode: Mode) -> None:
    here, there = (np.array(ids, dtype=np.int32) for ids in ((9, 8, 3), (4, 5, 6)))
    p, d = Rank("prefill", mode), Rank("decode", mode)
    try:
        began = time.monotonic()
        wanted = request(T, there, mode)
        p.step(Expect(T, 1, ()))
        d.step(Receive(wanted, p.address))
        run([p, d], lambda: p.tables.get("sender_claims") == 1)
        computed_at = time.monotonic()
        launched = offer(T, here)
        p.step(PendingOffer(launched.offer, launched.fence, computed_at))

        def over() -> bool:
            return bool(p.events) and bool(d.events)

        run([p, d], over)
        (closed,), (received,) = p.events, d.events
        assert isinstance(closed, SenderClosed)
        assert isinstance(received, Received)
    finally:
        d.close()
        p.close()
    sent, got = closed.stamps.at, received.stamps.at
    assert received.tokens == len(here) * BLOCK_TOKENS
    assert closed.stamps.chunks == received.stamps.chunks == 1
    assert sent[Stage.PREFILL_ENDED] == computed_at
    assert began < got[Stage.ASKED] <= sent[Stage.REGISTERED] <= computed_at
    assert computed_at <= sent[Stage.FIRST_POSTED] <= sent[Stage.WRITTEN]
    assert got[Stage.ANSWERED] <= got[Stage.PREFILL_ENDED]
    assert got[Stage.PREFILL_ENDED] <= got[Stage.LAST_NOTIFICATION] <= time.monotonic()
    assert sent[Stage.LAST_POSTED] <= got[Stage.LAST_NOTIFICATION]


def test_computation_that_was_waited_for_ends_when_its_fence_opens() -> None:
    p = Rank("prefill", Mode.PUSH)
    try:
        computed = False
        launched = offer(T, np.array([1, 2], dtype=np.int32)).offer
        pending = PendingOffer(launched, lambda: computed, time.monotonic())
        p.step(Expect(T, None, ()), pending)
        p.step()
        opened_at = time.monotonic()
        computed = True
        p.step()
        (handoff,) = p.loop._sender._handoffs.values()
        assert handoff.stamps.at[Stage.PREFILL_ENDED] >= opened_at
    finally:
        p.close()


# ---- the scheduler's sides


def test_the_prefill_side_completes_a_timeline() -> None:
    side = PrefillEngine(world_size=2)
    prompt = engine_request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, 1))
    now = time.monotonic()
    held = allocate(side.pool, 3)
    tables = {prompt.request_id: held}
    side.side.build(step(new=[(prompt, 0, 30)], tables=tables), now + 1)
    _, (made,) = side.side.build(
        step(running=[(prompt, 30, 10)], tables=tables), now + 2
    )
    side.side.finished(finish(prompt, LENGTH), held.get_block_ids())
    for rank in range(2):
        stamps = Stamps()
        for seconds, stage in enumerate(
            (Stage.REGISTERED, Stage.PREFILL_ENDED, Stage.LAST_POSTED, Stage.WRITTEN)
        ):
            stamps.mark(stage, now + 2 + seconds + rank / 4)
        stamps.chunks = 1
        side.side.closed(
            rank,
            SenderClosed(T, made.generation, CloseReason.SERVED, 40, SIZE, 0.5, stamps),
        )
    record = side.last()
    stages: Any = record["stages"]
    assert stages["prefill_started"] == pytest.approx(1, abs=0.1)
    assert stages["registered"] == pytest.approx(2, abs=0.1)
    assert stages["written"] == pytest.approx(5.25, abs=0.1)
    assert record["chunks"] == 2
    phases: Any = record["phases"]
    assert [phase["name"] for phase in phases] == [
        phase.name for phase in PHASES[Role.SENDER]
    ]


def test_a_preempted_prompt_has_started_once() -> None:
    side = PrefillEngine(chunked=True)
    prompt = engine_request("r-12345678")
    side.side.new_request(prompt, PrefillParams(T, 1))
    now = time.monotonic()
    tables = {prompt.request_id: allocate(side.pool, 3)}
    side.side.build(step(new=[(prompt, 0, 16)], tables=tables), now + 1)
    lost = step(tables=tables)
    lost.preempted_req_ids = {prompt.request_id}
    side.side.build(lost, now + 2)
    _, (made,) = side.side.build(
        step(running=[(prompt, 0, 40)], tables=tables), now + 3
    )
    side.closed(made.generation)
    stages: Any = side.last()["stages"]
    assert stages["prefill_started"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("outcome", ["received", "failed"])
def test_the_decode_side_adds_what_workers_saw(outcome: str) -> None:
    side = DecodeEngine()
    name = side.park()
    stamps = Stamps()
    stamps.mark(Stage.ASKED, time.monotonic() + 5)
    stamps.chunks = 3
    if outcome == "received":
        side.loads.received(0, Received(name, 40, SIZE, 0.5, stamps))
        assert side.complete()
    else:
        kind = FailureKind.REFUSED
        side.loads.failed(0, ReceiveFailed(name, kind, "no", True, stamps))
        assert side.failing()
        side.complete({side.name})
    record = side.last()
    stages: Any = record["stages"]
    assert record["outcome"] == outcome
    assert stages["asked"] == pytest.approx(5, abs=0.1)
    # The clock of the engine here stands still at 0.
    assert stages["registered"] < 0
    assert record["chunks"] == 3
