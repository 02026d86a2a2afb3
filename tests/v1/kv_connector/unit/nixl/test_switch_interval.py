# SPDX-License-Identifier: Apache-2.0
"""The interpreter's switch interval is lowered for a while, and put back."""

import sys
import threading
from collections.abc import Iterator

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.switch_interval import (
    EAGER_SECONDS,
    SwitchInterval,
)

FOUND = 0.004


@pytest.fixture(autouse=True)
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(FOUND)
    yield
    sys.setswitchinterval(before)


def _now() -> float:
    return round(sys.getswitchinterval(), 6)


def test_it_is_lowered_and_put_back() -> None:
    holder = SwitchInterval()
    assert not holder.low
    holder.lower()
    assert holder.low
    assert _now() == EAGER_SECONDS
    holder.restore()
    assert not holder.low
    assert _now() == FOUND


def test_saying_it_twice_changes_nothing() -> None:
    holder = SwitchInterval()
    holder.lower()
    holder.lower()
    holder.restore()
    assert _now() == FOUND
    holder.restore()
    assert _now() == FOUND


def test_the_last_holder_puts_it_back() -> None:
    first, second = SwitchInterval(), SwitchInterval()
    first.lower()
    second.lower()
    first.restore()
    assert _now() == EAGER_SECONDS
    second.restore()
    assert _now() == FOUND


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    holder = SwitchInterval()
    holder.lower()
    sys.setswitchinterval(0.002)
    holder.restore()
    assert _now() == 0.002


def test_a_lower_interval_is_left_alone() -> None:
    sys.setswitchinterval(EAGER_SECONDS / 5)
    holder = SwitchInterval()
    holder.lower()
    assert _now() == EAGER_SECONDS / 5
    holder.restore()
    assert _now() == EAGER_SECONDS / 5


def test_threads_that_lower_and_restore_at_the_same_time_leave_it_as_it_was() -> None:
    holders = [SwitchInterval() for _ in range(3)]

    def use(holder: SwitchInterval) -> None:
        for _ in range(2000):
            holder.lower()
            holder.restore()

    threads = [
        threading.Thread(target=use, args=(holder,)) for holder in (*holders, *holders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(holder.low for holder in holders)
    assert _now() == FOUND
