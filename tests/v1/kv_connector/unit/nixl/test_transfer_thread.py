# SPDX-License-Identifier: Apache-2.0
"""The thread that repeats a real transfer loop, seen from outside."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from v1.kv_connector.unit.nixl.arena import CONFIG, Memory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import rhythm, transfer_thread
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Expect,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import (
    Facts,
    Order,
    Pace,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.switch_interval import (
    EAGER_SECONDS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_loop import TransferLoop
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_thread import (
    TransferThread,
)

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0
FOUND = 0.004
T = TransferId("t")


class Rank(Memory):
    """A rank whose loop is repeated by a thread of its own."""

    def __init__(self) -> None:
        super().__init__("engine", Mode.PUSH)
        self._last: dict[str, int] = {}
        self.thread = TransferThread(self._make)

    def tables(self) -> dict[str, int]:
        facts = self.thread.drain()
        self._last = self._last if facts is None else facts.tables
        return self._last

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"not so within {PATIENCE_S} s"
            time.sleep(0.0005)

    def _make(self, publish: Callable[[Facts], None]) -> TransferLoop:
        return TransferLoop(
            CONFIG,
            self.agent,
            self.info,
            Mode.PUSH,
            None,
            publish,
            time.monotonic,
        )


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(FOUND)
    # It sleeps until there is an order.
    monkeypatch.setattr(rhythm, "RELAXED_SECONDS", PATIENCE_S)
    rank = Rank()
    yield rank
    rank.thread.close()
    sys.setswitchinterval(before)


def _is(interval: float) -> bool:
    return abs(sys.getswitchinterval() - interval) < 1e-6


class Held:
    """The loop's next step waits until it is let go."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self._step = rank.thread.loop.step
        self._working = threading.Event()
        self._go = threading.Event()
        monkeypatch.setattr(rank.thread.loop, "step", self._wait)

    def until_working(self) -> None:
        assert self._working.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._go.set()

    def _wait(self, orders: Iterable[Order]) -> Pace:
        self._working.set()
        assert self._go.wait(PATIENCE_S)
        return self._step(orders)


def test_an_order_lowers_the_interval_at_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(rank, monkeypatch)
    assert _is(FOUND)
    rank.thread.submit([Expect(T, 1, ())])
    # The woken thread could not do this: it needs the interpreter, which is here.
    assert _is(EAGER_SECONDS)
    held.until_working()
    assert _is(EAGER_SECONDS)
    held.let_go()
    rank.until(lambda: _is(FOUND))


def test_an_order_that_can_wait_does_not_lower_it(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(rank, monkeypatch)
    rank.thread.submit([], at_once=False)
    rank.thread.submit([Expect(T, 1, ())], at_once=False)
    assert _is(FOUND)
    held.let_go()
    rank.until(lambda: rank.tables().get("sender_handoffs") == 1)


def test_it_looks_when_a_computation_ends_if_somebody_may_have_asked(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    pace = [Pace.STEADY]

    def look(orders: Iterable[Order]) -> Pace:
        looks.append(time.monotonic())
        return pace[0]

    monkeypatch.setattr(rank.thread.loop, "step", look)
    monkeypatch.setattr(rhythm, "PATIENT_SECONDS", PATIENCE_S)
    monkeypatch.setattr(rhythm, "LATER_SECONDS", PATIENCE_S)
    rank.thread.computing(True)
    rank.thread.submit([Expect(T, 1, ())])
    rank.until(lambda: len(looks) == 1)
    rank.until(lambda: rank.thread._steady)
    rank.thread.computing(True)
    rank.thread.computing(False)
    rank.until(lambda: len(looks) == 2)
    # Nothing has ended since.
    rank.thread.computing(False)
    pace[0] = Pace.RELAXED
    rank.thread.submit([Expect(T, 1, ())])
    rank.until(lambda: len(looks) == 3)
    rank.until(lambda: not rank.thread._steady)
    rank.thread.computing(True)
    rank.thread.computing(False)
    time.sleep(0.05)
    assert len(looks) == 3


def test_it_is_put_back_when_there_is_nothing_to_do(rank: Rank) -> None:
    rank.thread.submit([Expect(T, 1, ())])
    rank.until(lambda: rank.tables().get("sender_handoffs") == 1)
    rank.thread.submit([Withdraw(T, "over")])
    rank.until(lambda: rank.tables().get("sender_handoffs") == 0)
    rank.until(lambda: _is(FOUND))
    assert rank.thread.queued == 0


def test_it_is_put_back_while_a_request_is_parked(rank: Rank) -> None:
    rank.thread.submit([Expect(T, 1, ())])
    rank.until(lambda: rank.tables().get("sender_handoffs") == 1)
    rank.until(lambda: _is(FOUND))
    assert rank.tables()["sender_handoffs"] == 1


def test_it_is_put_back_at_the_end(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(rank, monkeypatch)
    rank.thread.submit([Expect(T, 1, ())])
    held.until_working()
    assert _is(EAGER_SECONDS)
    closing = threading.Thread(target=rank.thread.close)
    closing.start()
    held.let_go()
    closing.join()
    assert _is(FOUND)
    assert not rank.thread.alive


def test_it_is_put_back_after_a_step_that_fails(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[bool] = []

    def fail(orders: object) -> None:
        failed.append(True)
        raise RuntimeError("a defect")

    monkeypatch.setattr(rank.thread.loop, "step", fail)
    rank.thread.submit([Expect(T, 1, ())])
    rank.until(lambda: bool(failed))
    rank.until(lambda: _is(FOUND))
    assert rank.thread.alive


def test_orders_that_come_while_it_works_are_counted(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(rank, monkeypatch)
    rank.thread.submit([Expect(TransferId("first"), 1, ())])
    held.until_working()
    assert rank.thread.queued == 0
    rank.thread.submit([Expect(T, 1, ()), Withdraw(T, "over")])
    assert rank.thread.queued == 2
    held.let_go()
    rank.until(lambda: rank.thread.queued == 0)


def test_a_step_that_does_not_end_is_told(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_thread, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(transfer_thread, "STALL_LOG_SECONDS", 0.1)
    told: list[str] = []
    monkeypatch.setattr(
        transfer_thread.logger, "error", lambda text, *_: told.append(text)
    )
    monkeypatch.setattr(rhythm, "RELAXED_SECONDS", 0.01)
    held = Held(rank, monkeypatch)
    rank.thread.submit([Expect(T, 1, ())])
    held.until_working()
    stuck: list[float] = []

    def stalled() -> float:
        stuck.append(rank.thread.new_stall())
        return sum(stuck)

    rank.until(lambda: stalled() > 0.3)
    (text,) = told
    assert "has not come back from a step" in text
    # Each call tells only what is new, so that they add up.
    assert max(stuck) < 0.3
    held.let_go()
    # Two in a row: the first may still see the step that has just ended.
    rank.until(lambda: rank.thread.new_stall() == rank.thread.new_stall() == 0)
