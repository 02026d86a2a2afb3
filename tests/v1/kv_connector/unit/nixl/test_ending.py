# SPDX-License-Identifier: Apache-2.0
"""A rank that ends while its peers take, give and ask; real loops, real NIXL."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from v1.kv_connector.unit.nixl.arena import Rank, keep, offer, request, run
from v1.kv_connector.unit.nixl.test_transfer_loop import HERE, THERE, Pair, T
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import ending
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
    Received,
    ReceiveFailed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import new_name
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId

pytestmark = pytest.mark.timeout(90)

FOREVER_S = 60.0
"""Longer than any of these tests takes."""


class Closing:
    """The end of a rank's loop, on a thread as in a worker."""

    def __init__(self, rank: Rank, patience: float = FOREVER_S) -> None:
        self._thread = threading.Thread(target=rank.loop.close, args=(patience,))
        self._thread.start()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(FOREVER_S / 2)
        assert self.ended()


@pytest.fixture(params=Mode)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    # Each test closes the loop that it is about; the side channels stay open.
    pair = Pair(request.param)
    yield pair
    for rank in (pair.d, pair.p):
        rank._server.close()


def _until(rank: Rank, condition: Callable[[], bool]) -> None:
    run([rank], condition)


def _failures(rank: Rank) -> list[ReceiveFailed]:
    return [event for event in rank.events if isinstance(event, ReceiveFailed)]


def _received(rank: Rank) -> bool:
    return any(isinstance(event, Received) for event in rank.events)


def _computed(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))


def test_computed_kv_is_waited_for(pair: Pair) -> None:
    _computed(pair)
    closing = Closing(pair.p)
    time.sleep(0.3)
    assert not closing.ended()
    pair.receive()
    _until(pair.d, lambda: _received(pair.d))
    closing.wait()
    assert pair.moved()
    # It has taken its leave.
    _until(pair.d, lambda: not pair.d.loop._connections.all())
    pair.d.loop.close()


def test_what_is_not_computed_is_refused_at_once(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()))
    wanted = pair.receive()
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    Closing(pair.p).wait()
    _until(pair.d, lambda: bool(_failures(pair.d)))
    (failed,) = _failures(pair.d)
    assert failed.registration_id == wanted.registration_id
    assert (failed.kind, failed.quiet) == (FailureKind.REFUSED, True)
    assert failed.reason == ending.REASON
    pair.d.loop.close()


def test_who_comes_during_the_end_is_refused(pair: Pair) -> None:
    _computed(pair)
    closing = Closing(pair.p)
    other = request(TransferId("other"), THERE, pair.d.mode)
    pair.d.step(Receive(other, pair.p.address))
    _until(pair.d, lambda: bool(_failures(pair.d)))
    (failed,) = _failures(pair.d)
    assert (failed.kind, failed.reason) == (FailureKind.REFUSED, ending.REASON)
    assert not closing.ended()
    pair.receive()
    _until(pair.d, lambda: _received(pair.d))
    closing.wait()
    pair.d.loop.close()


def test_nobody_is_waited_for_without_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        ending.logger, "warning", lambda text, *values: told.append(text % values)
    )
    _computed(pair)
    Closing(pair.p, patience=0.2).wait()
    (text,) = told
    assert "KV of 1 prompts that nobody has asked for" in text
    assert "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS" in text
    pair.d.loop.close()


def test_a_rank_with_nothing_open_ends_at_once(pair: Pair) -> None:
    Closing(pair.p).wait()
    Closing(pair.d).wait()


def test_a_receiver_takes_its_blocks_back_first(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()))
    pair.receive()
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    closing = Closing(pair.d)
    _until(pair.p, closing.ended)
    closing.wait()
    if pair.p.mode is Mode.PUSH:
        # Only then can nothing be written into what is unmapped next.
        assert pair.p.tables["sender_claims"] == 0
    _until(pair.p, lambda: pair.p.tables["sender_claims"] == 0)
    pair.p.step(offer(T, HERE))
    _until(pair.p, lambda: pair.p.tables["sender_handoffs"] == 0)
    assert pair.untouched()
    pair.p.loop.close()


def test_kept_kv_can_be_read_by_those_who_read_it_already(pair: Pair) -> None:
    name = new_name()
    pair.d.pages[:] = np.random.default_rng(3).integers(1, 256, pair.d.pages.shape)
    pair.d.step(keep(name, THERE))
    wanted = request(name, HERE, Mode.PULL)
    pair.p.step(Receive(wanted, pair.d.address))
    run([pair.p, pair.d], lambda: pair.d.tables.get("kept_leases") == 1)
    closing = Closing(pair.d)
    _until(pair.p, lambda: _received(pair.p))
    closing.wait()
    assert np.array_equal(pair.d.pages[:, THERE], pair.p.pages[:, HERE])
    pair.p.loop.close()


def test_kept_kv_is_refused_to_those_who_come_late(pair: Pair) -> None:
    name = new_name()
    pair.d.step(keep(name, THERE), Expect(T, 1, ()), offer(T, HERE))
    # Its unclaimed KV holds the end up.
    closing = Closing(pair.d, patience=5.0)
    pair.p.step(Receive(request(name, HERE, Mode.PULL), pair.d.address))
    _until(pair.p, lambda: bool(_failures(pair.p)))
    (failed,) = _failures(pair.p)
    assert failed.kind is FailureKind.REFUSED
    assert "kept no longer" in failed.reason
    closing.wait()
    pair.p.loop.close()
