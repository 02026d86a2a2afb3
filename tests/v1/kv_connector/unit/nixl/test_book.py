# SPDX-License-Identifier: Apache-2.0
"""Names of hand-offs, and what is remembered of those that are closed."""

from v1.kv_connector.unit.nixl.sender_side import (
    MOVED,
    D,
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
    written,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    StartWrite,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.book import HISTORY
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
)


def test_a_request_is_found_under_all_its_names() -> None:
    table = new_table()
    table.register(D, registration(R, U), 0)
    table.expect(T, 2, (U, T), 1)
    table.register(D, registration(S, T), 2)
    assert table.sizes() == {"sender_handoffs": 1, "sender_claims": 2}
    assert len(table.offer(offered(), 3)) == 2
    table.written(D, R, 0, MOVED, None, 4)
    table.written(D, S, 0, MOVED, None, 4)
    assert not any(table.sizes().values())
    late = RegistrationId("late")
    assert "num_receivers" in refusal(table.register(D, registration(late, U), 5))


def test_anothers_own_name_is_no_alias() -> None:
    # Clients choose request ids: one may equal another request's transfer_id.
    table = new_table()
    table.expect(T, 1, (), 0)
    table.offer(offered(T, 1), 0)
    table.expect(U, 1, (T,), 1)
    (write,) = table.register(D, registration(R, T), 2)
    assert isinstance(write, StartWrite)
    (closed,) = closings(written(table, 3))
    assert (closed.transfer_id, closed.generation) == (T, 1)


def test_an_own_name_goes_before_anothers_alias() -> None:
    table = new_table()
    table.expect(T, 1, (U,), 0)
    table.expect(U, 1, (), 0)
    table.offer(offered(T, 1), 1)
    table.offer(offered(U, 2), 1)
    assert {
        closed.generation
        for name in (T, U)
        for closed in closings(table.not_needed(name, 0, 2))
    } == {1, 2}
    assert not any(table.sizes().values())


def test_old_outcomes_are_forgotten() -> None:
    table = new_table()
    for index in range(HISTORY + 1):
        table.withdraw(TransferId(f"t{index}"), "aborted", 0)
    assert sent(table.register(D, registration(R, TransferId("t0")), 1)) == [
        Accepted(R)
    ]
    assert refusal(table.register(D, registration(S, TransferId("t1")), 1)) == "aborted"
