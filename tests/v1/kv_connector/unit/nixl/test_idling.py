# SPDX-License-Identifier: Apache-2.0
"""How long steps wait that compute nothing."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Receive,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.idling import (
    READ_SECONDS,
    WAIT_SECONDS,
    WAIT_SHARE,
    Idling,
)

SHORTEST, LONGEST = WAIT_SECONDS
ORDER = Withdraw(TransferId("t"), "over")


def _receive(mode: Mode) -> Receive:
    want = Want(64, 0, 64, b"")
    request = ReceiveRequest(RegistrationId("r"), TransferId("t"), want, (), 60.0, mode)
    return Receive(request, ("host", 1))


def test_the_step_that_orders_a_read_waits_for_most_of_them() -> None:
    idling = Idling(0.0)
    idling.begin(computes=False, orders=[ORDER, _receive(Mode.PULL)], now=1.0)
    assert idling.wait(1.0) == READ_SECONDS
    assert idling.wait(2.0) == LONGEST >= READ_SECONDS
    idling.begin(computes=False, orders=[], now=2.0)
    idling.heard(2.0)
    assert idling.wait(2.0) == SHORTEST
    idling.begin(computes=False, orders=[_receive(Mode.PUSH)], now=2.0)
    assert idling.wait(2.0) == SHORTEST


def test_a_step_that_computes_does_not_wait() -> None:
    idling = Idling(0.0)
    assert idling.wait(10.0) == 0.0
    idling.begin(computes=True, orders=[], now=10.0)
    assert idling.wait(20.0) == 0.0


def test_the_wait_grows_in_silence() -> None:
    idling = Idling(0.0)
    idling.begin(computes=False, orders=[ORDER], now=1.0)
    assert idling.wait(1.0) == SHORTEST
    idling.begin(computes=False, orders=[], now=1.0)
    between = (SHORTEST + LONGEST) / 2
    assert abs(idling.wait(1.0 + between / WAIT_SHARE) - between) < 1e-9
    assert idling.wait(2.0) == LONGEST


def test_news_and_orders_make_it_short_again() -> None:
    idling = Idling(0.0)
    idling.begin(computes=False, orders=[], now=1.0)
    assert idling.wait(2.0) == LONGEST
    idling.heard(2.0)
    assert idling.wait(2.0) == SHORTEST
    idling.begin(computes=False, orders=[ORDER], now=3.0)
    assert idling.wait(3.0) == SHORTEST


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 10))))
def test_the_wait_is_bounded(steps: list[tuple[bool, bool, float]]) -> None:
    idling, now = Idling(0.0), 0.0
    for computes, has_orders, passed in steps:
        now += passed
        idling.begin(computes, [ORDER] if has_orders else [], now)
        wait = idling.wait(now)
        assert wait == 0.0 if computes else SHORTEST <= wait <= LONGEST
