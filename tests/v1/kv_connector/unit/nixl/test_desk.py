# SPDX-License-Identifier: Apache-2.0
"""Claims on hand-offs: who is let in, and what is said to whom for good."""

import pytest

from v1.kv_connector.unit.nixl.sender_side import (
    MOVED,
    D,
    E,
    R,
    S,
    T,
    U,
    closings,
    new_table,
    offered,
    refusal,
    registration,
    sent,
    wanted,
    written,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff import book, desk
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Send,
    StartWrite,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancelled,
    Finished,
    Register,
    Want,
)


@pytest.mark.parametrize(
    ("want", "blocks", "said"),
    [
        (wanted(prompt=11), (1, 2, 3), "11 tokens, the prefill prompt 10"),
        (wanted(digest=b"other"), (1, 2, 3), "differ"),
        (wanted(first=2), (1, 2, 3), "block-aligned"),
        (Want(10, 4, 7, b"digest"), (1, 2), "block-aligned"),
        (Want(10, 4, 0, b"digest"), (), "block-aligned"),
        (wanted(), (1, 2), "2"),
        (wanted(), (1, 2, 3, 4), "4"),
    ],
)
def test_what_does_not_fit_the_offer_is_refused(
    want: Want, blocks: tuple[int, ...], said: str
) -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    actions = table.register(D, registration(want=want, blocks=blocks), 0)
    assert said in refusal(actions)
    assert len(closings(actions)) == 1


def test_prompts_without_token_ids_are_not_compared() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(), 0)
    (write,) = table.register(D, registration(want=wanted(digest=b"")), 0)
    assert isinstance(write, StartWrite)


def test_a_repeated_registration_gets_the_same_answer() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    table.register(D, registration(), 0)
    assert sent(table.register(D, registration(), 1)) == [Accepted(R)]
    table.offer(offered(), 2)
    assert sent(table.register(D, registration(), 3)) == [Accepted(R)]
    written(table, 4)
    assert table.register(D, registration(), 5) == [Send(D, Finished(R))]


def test_a_cancel_that_overtakes_its_registration_wins() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    assert sent(table.cancel(D, R, T, 0)) == [Cancelled(R)]
    assert sent(table.register(D, registration(), 1)) == [Cancelled(R)]
    assert len(closings(table.offer(offered(), 2))) == 1


def test_a_refusal_holds_when_its_transfer_id_is_used_again() -> None:
    # The receiver gave its blocks away on the first answer.
    table = new_table()
    table.withdraw(T, "aborted", 0)
    assert refusal(table.register(D, registration(), 1)) == "aborted"
    table.expect(T, 1, (), 2)
    assert refusal(table.register(D, registration(), 3)) == "aborted"
    assert table.offer(offered(), 4) == []


def test_a_malformed_registration_is_refused_for_good() -> None:
    table = new_table()
    table.expect(T, 1, (), 0)
    bad = Register(T, R, wanted(), (b"123",))
    assert "int32" in refusal(table.register(D, bad, 0))
    assert "int32" in refusal(table.register(D, registration(), 1))


def test_a_claim_belongs_to_who_made_it() -> None:
    table = new_table()
    table.expect(T, 2, (), 0)
    table.register(D, registration(), 0)
    assert sent(table.cancel(E, R, T, 1)) == [Cancelled(R)]
    assert sent(table.register(E, registration(), 1)) == [Cancelled(R)]
    (write,) = table.offer(offered(), 2)
    assert isinstance(write, StartWrite)
    assert write.peer == D
    assert table.written(E, R, 0, MOVED, None, 3) == []
    (closed,) = closings(written(table, 3))
    assert closed.tokens == 10


def test_claimed_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MAX_CLAIMED_BLOCKS", 5)
    table = new_table()
    table.register(D, registration(R, T), 0)
    refused = table.register(D, registration(S, U), 0)
    assert refusal(refused) == "too many blocks are claimed"
    table.cancel(D, R, T, 1)
    third = RegistrationId("q")
    assert sent(table.register(D, registration(third, U), 1)) == [Accepted(third)]


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_HANDOFFS", 2)
    monkeypatch.setattr(desk, "MAX_CLAIMS_PER_HANDOFF", 1)
    table = new_table()
    table.register(D, registration(R, T), 0)
    assert refusal(table.register(D, registration(S, T), 0)) == "too many receivers"
    table.not_needed(U, 1, 0)
    third = TransferId("v")
    table.not_needed(third, 1, 0)
    assert table.sizes()["sender_handoffs"] == 2
    refused = table.register(D, registration(RegistrationId("q"), third), 0)
    assert refusal(refused) == "too many hand-offs"
