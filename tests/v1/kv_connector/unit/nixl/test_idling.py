# SPDX-License-Identifier: Apache-2.0
"""How long steps wait that compute nothing."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.idling import (
    WAIT_SECONDS,
    WAIT_SHARE,
    Idling,
)

SHORTEST, LONGEST = WAIT_SECONDS


def test_a_step_that_computes_does_not_wait() -> None:
    idling = Idling(0.0)
    assert idling.wait(10.0) == 0.0
    idling.begin(computes=True, has_orders=False, now=10.0)
    assert idling.wait(20.0) == 0.0


def test_the_wait_grows_in_silence() -> None:
    idling = Idling(0.0)
    idling.begin(computes=False, has_orders=True, now=1.0)
    assert idling.wait(1.0) == SHORTEST
    idling.begin(computes=False, has_orders=False, now=1.0)
    between = (SHORTEST + LONGEST) / 2
    assert abs(idling.wait(1.0 + between / WAIT_SHARE) - between) < 1e-9
    assert idling.wait(2.0) == LONGEST


def test_news_and_orders_make_it_short_again() -> None:
    idling = Idling(0.0)
    idling.begin(computes=False, has_orders=False, now=1.0)
    assert idling.wait(2.0) == LONGEST
    idling.heard(2.0)
    assert idling.wait(2.0) == SHORTEST
    idling.begin(computes=False, has_orders=True, now=3.0)
    assert idling.wait(3.0) == SHORTEST


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 10))))
def test_the_wait_is_bounded(steps: list[tuple[bool, bool, float]]) -> None:
    idling, now = Idling(0.0), 0.0
    for computes, has_orders, passed in steps:
        now += passed
        idling.begin(computes, has_orders, now)
        wait = idling.wait(now)
        assert wait == 0.0 if computes else SHORTEST <= wait <= LONGEST
