# SPDX-License-Identifier: Apache-2.0
"""The prefill side's table, for prompts that are computed chunk by chunk."""

from dataclasses import replace

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    Event,
    Offer,
    Report,
    Retracted,
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancelled,
    Finished,
    LeaseGranted,
    LeaseRequest,
    Message,
    Refused,
    Register,
    Want,
)

BLOCK = 4
PROMPT = 14
D = AgentName("d")
T = TransferId("t")
R, S = RegistrationId("r"), RegistrationId("s")
MOVED = TransferSize(100, 2)
TABLE = (10, 11, 12, 13)


@pytest.fixture
def table() -> SenderTable:
    table = SenderTable(30.0, BLOCK)
    table.expect(T, 1, (), 0)
    return table


def _offer(first: int, last: int, generation: int = 1) -> Offer:
    """The blocks from position ``first`` up to ``last``."""
    return Offer(
        T,
        generation,
        PROMPT,
        b"digest",
        (np.array(TABLE[first:last], dtype=np.int32),),
        first,
        max(0, PROMPT - last * BLOCK),
    )


def _register(first_block: int = 0, registration_id: RegistrationId = R) -> Register:
    first = first_block * BLOCK
    want = Want(PROMPT, first, PROMPT - first, b"digest")
    return Register(
        T, registration_id, want, (pack_blocks(range(20 + first_block, 24)),)
    )


def _written(
    table: SenderTable, chunk: int, failure: str | None = None
) -> list[Action]:
    return table.written(D, R, chunk, MOVED, failure, 5)


def _moves(actions: list[Action]) -> list[tuple[int, bool, list[int], list[int]]]:
    return [
        (
            action.chunk,
            action.last,
            action.local_blocks[0].tolist(),
            action.remote_blocks[0].tolist(),
        )
        for action in actions
        if isinstance(action, StartWrite)
    ]


def _sent(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def _events(actions: list[Action]) -> list[Event]:
    return [action.event for action in actions if isinstance(action, Report)]


def test_each_chunk_is_written_when_it_is_computed(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    assert _moves(table.offer(_offer(0, 1), 1)) == [(0, False, [10], [20])]
    # The next one does not wait for the one before.
    assert _moves(table.offer(_offer(1, 3), 2)) == [(1, False, [11, 12], [21, 22])]
    assert _written(table, 1) == []
    assert _written(table, 0) == []
    assert _moves(table.offer(_offer(3, 4), 3)) == [(2, True, [13], [23])]
    (closed,) = _events(_written(table, 2))
    assert isinstance(closed, SenderClosed)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, PROMPT)
    assert closed.size == TransferSize(300, 6)
    assert _sent(table.register(D, _register(), 6)) == [Finished(R)]
    assert not any(table.sizes().values())


def test_only_what_goes_on_with_a_message_is_urgent(table: SenderTable) -> None:
    assert (table.busy, table.urgent) == (True, False)
    table.offer(_offer(0, 1), 0)
    # Whoever asks now gets it at once.
    assert table.urgent
    table.register(D, _register(), 1)
    assert not table.urgent
    table.offer(_offer(1, 4), 2)
    assert table.urgent
    _written(table, 0)
    _written(table, 1)
    assert not table.urgent


def test_who_comes_late_gets_what_is_there_at_once(table: SenderTable) -> None:
    table.offer(_offer(0, 1), 0)
    table.offer(_offer(1, 2), 1)
    actions = table.register(D, _register(), 2)
    assert _sent(actions) == [Accepted(R)]
    assert _moves(actions) == [(0, False, [10, 11], [20, 21])]
    assert _sent(table.register(D, _register(), 3)) == [Accepted(R)]
    assert _moves(table.offer(_offer(2, 4), 4)) == [(1, True, [12, 13], [22, 23])]


def test_what_a_receiver_has_already_is_not_written(table: SenderTable) -> None:
    table.register(D, _register(first_block=2), 0)
    assert table.offer(_offer(0, 1), 1) == []
    assert _moves(table.offer(_offer(1, 3), 2)) == [(0, False, [12], [22])]
    assert _moves(table.offer(_offer(3, 4), 3)) == [(1, True, [13], [23])]


def test_who_does_not_fit_is_refused_with_the_first_chunk(table: SenderTable) -> None:
    table.register(D, Register(T, R, Want(PROMPT, 0, PROMPT, b"other"), (b"",)), 0)
    (refused,) = _sent(table.offer(_offer(0, 1), 1))
    assert isinstance(refused, Refused)
    assert "differ" in refused.reason
    # The prompt is computed in any case; nobody is left to take it.
    assert len(_events(table.offer(_offer(1, 4), 2))) == 1


def test_a_reader_waits_for_the_whole_prompt(table: SenderTable) -> None:
    table.offer(_offer(0, 2), 0)
    want = Want(PROMPT, 0, PROMPT, b"digest")
    assert _sent(table.lease_request(D, LeaseRequest(T, R, want), 1)) == [Accepted(R)]
    (granted,) = _sent(table.offer(_offer(2, 4), 2))
    assert isinstance(granted, LeaseGranted)
    assert granted.blocks == (pack_blocks(TABLE),)


def test_a_cancel_between_two_chunks_is_answered_at_once(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    _written(table, 0)
    assert _sent(table.cancel(D, R, T, 2)) == [Cancelled(R)]
    assert len(_events(table.offer(_offer(1, 4), 3))) == 1


def test_a_cancel_waits_for_all_writes_and_no_more_begin(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    table.offer(_offer(1, 2), 1)
    assert table.cancel(D, R, T, 2) == []
    assert _moves(table.offer(_offer(2, 4), 3)) == []
    assert _written(table, 0) == []
    actions = _written(table, 1)
    assert _sent(actions) == [Cancelled(R)]
    assert len(_events(actions)) == 1


def test_a_failed_chunk_ends_it_when_the_others_have_ended(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    table.offer(_offer(1, 2), 1)
    assert _written(table, 1, "broken") == []
    assert _moves(table.offer(_offer(2, 4), 3)) == []
    assert _sent(_written(table, 0)) == [Refused(R, "broken")]


def test_an_abort_between_two_chunks_is_told(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    _written(table, 0)
    actions = table.withdraw(T, "aborted", 2)
    assert _sent(actions) == [Refused(R, "aborted")]
    (closed,) = _events(actions)
    assert isinstance(closed, SenderClosed)
    assert (closed.reason, closed.tokens) == (CloseReason.WITHDRAWN, 0)


def test_an_abort_under_a_chunk_waits_for_it(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    assert table.withdraw(T, "aborted", 2) == []
    # Computed before the abort was known, and seen after it.
    assert table.offer(_offer(1, 2), 3) == []
    actions = _written(table, 0)
    assert _sent(actions) == [Refused(R, "aborted")]
    assert len(_events(actions)) == 1


def test_a_lost_receiver_gets_no_more_chunks(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    assert table.peer_lost(D, 2) == []
    assert table.offer(_offer(1, 2), 3) == []
    assert _sent(_written(table, 0)) == []
    (closed,) = _events(table.offer(_offer(2, 4), 4))
    assert isinstance(closed, SenderClosed)
    assert (closed.reason, closed.tokens) == (CloseReason.RELEASED, 0)


# ---- layers


def _part(part: int, first: int = 0, last: int = 4) -> Offer:
    return replace(_offer(first, last), part=part, parts=2)


def _parts(actions: list[Action]) -> list[tuple[int, int, bool]]:
    return [
        (action.part, action.chunk, action.last)
        for action in actions
        if isinstance(action, StartWrite)
    ]


def test_groups_of_layers_are_written_as_they_are_computed(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    assert _parts(table.offer(_part(0, 0, 2), 1)) == [(0, 0, False)]
    assert _moves(table.offer(_part(1, 0, 2), 1)) == [(1, False, [10, 11], [20, 21])]
    assert _moves(table.offer(_part(0, 2, 4), 2)) == [(2, False, [12, 13], [22, 23])]
    for chunk in range(3):
        assert _written(table, chunk) == []
    assert _parts(table.offer(_part(1, 2, 4), 3)) == [(1, 3, True)]
    (closed,) = _events(_written(table, 3))
    assert isinstance(closed, SenderClosed)
    assert closed.tokens == PROMPT


def test_who_comes_between_two_groups_gets_what_is_there(table: SenderTable) -> None:
    table.offer(_part(0), 0)
    assert _parts(table.register(D, _register(), 1)) == [(0, 0, False)]
    assert _parts(table.offer(_part(1), 2)) == [(1, 1, True)]


def test_who_comes_after_all_groups_gets_them_all(table: SenderTable) -> None:
    table.offer(_part(0), 0)
    table.offer(_part(1), 0)
    assert _parts(table.register(D, _register(), 1)) == [(0, 0, False), (1, 1, True)]


def test_a_reader_waits_for_all_groups(table: SenderTable) -> None:
    table.offer(_part(0), 0)
    want = Want(PROMPT, 0, PROMPT, b"digest")
    assert _sent(table.lease_request(D, LeaseRequest(T, R, want), 1)) == [Accepted(R)]
    assert len(_sent(table.offer(_part(1), 2))) == 1


# ---- preemption


def test_a_preempted_prompt_goes_on_where_it_was(table: SenderTable) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 2), 1)
    _written(table, 0)
    assert table.retract(T, 1) == [Report(Retracted(T, 1))]
    # It is computed again; what has been written stays.
    assert table.offer(_offer(0, 1, generation=2), 2) == []
    assert _moves(table.offer(_offer(1, 3, 2), 3)) == [(1, False, [12], [22])]
    assert _moves(table.offer(_offer(3, 4, 2), 3)) == [(2, True, [13], [23])]


def test_preempted_blocks_are_held_until_nothing_reads_them(table: SenderTable) -> None:
    table.expect(T, 2, (), 0)
    table.register(D, _register(), 0)
    table.register(D, _register(registration_id=S), 0)
    table.offer(_offer(0, 2), 1)
    assert table.retract(T, 1) == []
    table.offer(_offer(0, 4, generation=2), 2)
    assert _events(_written(table, 0)) == []
    assert _events(table.written(D, S, 0, MOVED, None, 5)) == [Retracted(T, 1)]
    assert _events(_written(table, 1)) == []
    (closed,) = _events(table.written(D, S, 1, MOVED, None, 5))
    assert isinstance(closed, SenderClosed)
    assert closed.generation == 2


def test_a_chunk_of_a_preempted_prompt_that_comes_late_is_dropped(
    table: SenderTable,
) -> None:
    table.register(D, _register(), 0)
    table.offer(_offer(0, 1), 1)
    _written(table, 0)
    table.retract(T, 1)
    assert table.offer(_offer(1, 2), 2) == []
    assert _moves(table.offer(_offer(0, 4, 2), 3)) == [
        (1, True, [11, 12, 13], [21, 22, 23])
    ]


def test_a_retraction_of_what_is_over_is_confirmed(table: SenderTable) -> None:
    table.withdraw(T, "aborted", 1)
    assert table.retract(T, 1) == [Report(Retracted(T, 1))]


@pytest.mark.parametrize(
    ("block_size", "first", "blocks", "moves"),
    [
        (
            8,
            0,
            [30, 31],
            [([10], [30]), ([11, 12], [30, 31]), ([13], [31])],
        ),
        (
            2,
            2,
            [41, 42, 43, 44, 45, 46],
            [([10], [41]), ([11, 12], [42, 43, 44, 45]), ([13], [46])],
        ),
    ],
)
def test_chunks_go_into_blocks_of_another_size(
    table: SenderTable,
    block_size: int,
    first: int,
    blocks: list[int],
    moves: list[tuple[list[int], list[int]]],
) -> None:
    want = Want(PROMPT, first, PROMPT - first, b"digest", block_size)
    table.register(D, Register(T, R, want, (pack_blocks(blocks),)), 0)
    found = []
    for chunk in ((0, 1), (1, 3), (3, 4)):
        actions = table.offer(_offer(*chunk), 1)
        found += [(here, there) for _, _, here, there in _moves(actions)]
    assert found == moves


def test_tokens_begin_with_a_block_of_the_smaller_size(table: SenderTable) -> None:
    table.expect(T, 2, (), 0)
    table.offer(_offer(0, 4), 1)
    want = Want(PROMPT, 3, PROMPT - 3, b"digest", 2)
    (refused,) = _sent(table.lease_request(D, LeaseRequest(T, R, want), 2))
    assert isinstance(refused, Refused)
    want = Want(PROMPT, 2, PROMPT - 2, b"digest", 2)
    (granted,) = _sent(table.lease_request(D, LeaseRequest(T, S, want), 2))
    assert isinstance(granted, LeaseGranted)
    assert (granted.block_size, len(granted.blocks[0])) == (BLOCK, 4 * len(TABLE))
