# SPDX-License-Identifier: Apache-2.0
"""Kept KV that real transfer loops read back, whatever the pair's mode is."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from v1.kv_connector.unit.nixl import arena
from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    LAYERS,
    PAGE_BYTES,
    Rank,
    hand_off,
    keep,
    run,
)
from v1.kv_connector.unit.nixl.arena import request as wanted_all
from v1.kv_connector.unit.nixl.peer_process import PeerProcess
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Receive,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Event,
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import new_name
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Pace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want

pytestmark = pytest.mark.timeout(90)


def _ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int32)


KEPT, TAKEN = _ids(9, 8, 3, 4), _ids(20, 21, 22, 7)
TOKENS = len(KEPT) * BLOCK_TOKENS


class Pair:
    """D, which keeps KV under a name, and P, which reads it."""

    def __init__(self, mode: Mode) -> None:
        self.d = Rank("decode", mode)
        self.p = Rank("prefill", mode)
        self.name = new_name()
        rng = np.random.default_rng(2)
        self.d.pages[:] = rng.integers(1, 256, self.d.pages.shape)
        self.d.step(keep(self.name, KEPT))

    def wanted(self, first_block: int = 0) -> ReceiveRequest:
        first = first_block * BLOCK_TOKENS
        want = Want(TOKENS, first, TOKENS - first, b"")
        whole = wanted_all(self.name, TAKEN[first_block:], Mode.PULL)
        return replace(whole, want=want)

    def read(self, first_block: int = 0, by: Rank | None = None) -> ReceiveRequest:
        wanted = self.wanted(first_block)
        (by or self.p).step(Receive(wanted, self.d.address))
        return wanted

    def until(self, condition: Callable[[], bool]) -> None:
        run([self.p, self.d], condition)

    def until_granted(self) -> None:
        """D has granted a lease, of which P has not heard yet."""
        self.until(lambda: self.d.tables.get("kept_leases") == 1)

    def until_idle(self) -> None:
        self.d.step(Retire(self.name))
        self.until(lambda: not any((*self.p.tables.values(), *self.d.tables.values())))

    def same(self, first_block: int = 0) -> bool:
        mine, theirs = TAKEN[first_block:], KEPT[first_block:]
        return np.array_equal(self.p.pages[:, mine], self.d.pages[:, theirs])

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=Mode)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def _has(rank: Rank, kind: type[Event]) -> Callable[[], bool]:
    return lambda: any(isinstance(event, kind) for event in rank.events)


def _closed(rank: Rank) -> list[SenderClosed]:
    return [event for event in rank.events if isinstance(event, SenderClosed)]


def _failure(rank: Rank) -> ReceiveFailed:
    (failed,) = [event for event in rank.events if isinstance(event, ReceiveFailed)]
    return failed


def test_kept_kv_is_read_as_often_as_it_is_wanted(pair: Pair) -> None:
    wanted = pair.read()
    pair.until(_has(pair.p, Received))
    assert pair.same()
    (received,) = pair.p.events
    assert isinstance(received, Received)
    assert received.registration_id == wanted.registration_id
    assert received.size.bytes == len(KEPT) * LAYERS * PAGE_BYTES
    pair.p.events.clear()
    pair.p.pages[:] = 0
    pair.read()
    pair.until(_has(pair.p, Received))
    assert pair.same()
    assert _closed(pair.d) == []
    pair.until_idle()
    (closed,) = _closed(pair.d)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, 2 * TOKENS)


def test_what_the_reader_has_is_not_read(pair: Pair) -> None:
    pair.read(first_block=1)
    pair.until(_has(pair.p, Received))
    expected = np.zeros_like(pair.p.pages)
    expected[:, TAKEN[1:]] = pair.d.pages[:, KEPT[1:]]
    assert np.array_equal(pair.p.pages, expected)
    pair.until_idle()


def test_hand_offs_and_kept_kv_between_the_same_engines(pair: Pair) -> None:
    hand_off(pair.p, pair.d, "one way")
    pair.d.pages[:, KEPT] = 77
    pair.read()
    pair.until(_has(pair.p, Received))
    assert (pair.p.pages[:, TAKEN] == 77).all()
    hand_off(pair.p, pair.d, "and again")
    pair.until_idle()


def test_several_readers_at_once(pair: Pair) -> None:
    second = Rank("prefill2", pair.p.mode)
    pair.read()
    pair.read(by=second)
    ranks = [pair.p, pair.d, second]
    run(ranks, lambda: _has(pair.p, Received)() and _has(second, Received)())
    assert pair.same()
    assert np.array_equal(pair.p.pages, second.pages)
    second.close()
    pair.until_idle()


def test_keeping_costs_no_steps(pair: Pair) -> None:
    assert pair.d.loop.step(()) is Pace.RELAXED
    pair.read()
    pair.until_granted()
    assert pair.d.loop.step(()) is not Pace.RELAXED
    pair.until(_has(pair.p, Received))
    pair.until(lambda: pair.d.tables["kept_leases"] == 0)
    end = time.monotonic() + 10
    while pair.d.loop.step(()) is not Pace.RELAXED:
        assert time.monotonic() < end
    assert pair.d.tables["kept"] == 1


def test_what_is_retired_under_a_read_closes_when_that_has_ended(pair: Pair) -> None:
    pair.read()
    pair.until_granted()
    pair.d.step(Retire(pair.name))
    for _ in range(20):
        pair.d.step()
    assert _closed(pair.d) == []
    pair.until(_has(pair.p, Received))
    assert pair.same()
    pair.until(_has(pair.d, SenderClosed))
    pair.until_idle()


def test_a_read_that_outlasts_its_lease_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "CONFIG", replace(arena.CONFIG, kv_lease_duration=0.5))
    for mode in Mode:
        pair = Pair(mode)
        wanted = pair.read()
        pair.until_granted()
        pair.d.step(Retire(pair.name))
        # P is stopped meanwhile, and the blocks are used for something else.
        run([pair.d], _has(pair.d, SenderClosed))
        pair.d.pages[:, KEPT] = 66
        pair.until(_has(pair.p, ReceiveFailed))
        failed = _failure(pair.p)
        assert failed.registration_id == wanted.registration_id
        assert failed.kind is FailureKind.LEASE
        assert not _has(pair.p, Received)()
        pair.until_idle()
        pair.close()


def test_what_is_retired_before_a_read_is_refused(pair: Pair) -> None:
    pair.d.step(Retire(pair.name))
    assert len(_closed(pair.d)) == 1
    pair.read()
    pair.until(_has(pair.p, ReceiveFailed))
    failed = _failure(pair.p)
    assert (failed.kind, failed.quiet) == (FailureKind.REFUSED, True)
    assert not pair.p.pages.any()
    pair.until_idle()


def test_a_read_before_the_order_to_keep(pair: Pair) -> None:
    pair.d.step(Retire(pair.name))
    pair.name = new_name()
    pair.read()
    end = time.monotonic() + 0.3
    pair.until(lambda: time.monotonic() > end)
    assert pair.p.events == []
    pair.d.step(keep(pair.name, KEPT))
    pair.until(_has(pair.p, Received))
    assert pair.same()
    pair.until_idle()


def test_an_abort_under_the_read(pair: Pair) -> None:
    wanted = pair.read()
    pair.until_granted()
    pair.p.step(CancelReceive(wanted.registration_id, "aborted"))
    pair.d.step(Retire(pair.name))
    pair.until(_has(pair.d, SenderClosed))
    assert _failure(pair.p).kind is FailureKind.CANCELLED
    assert _failure(pair.p).quiet or _has(pair.p, ReceiveQuiet)()
    pair.until_idle()


def test_a_reader_that_leaves_holds_nothing(pair: Pair) -> None:
    reader = Rank("leaver", pair.p.mode)
    pair.read(by=reader)
    run([reader, pair.d], lambda: pair.d.tables.get("kept_leases") == 1)
    reader.close()
    pair.d.step(Retire(pair.name))
    pair.until(_has(pair.d, SenderClosed))
    pair.until_idle()


def test_parts_that_there_are_not(pair: Pair) -> None:
    wanted = replace(pair.wanted(), want=Want(TOKENS + 16, 0, TOKENS, b""))
    pair.p.step(Receive(wanted, pair.d.address))
    pair.until(_has(pair.p, ReceiveFailed))
    assert "kept" in _failure(pair.p).reason
    assert not pair.p.pages.any()
    pair.until_idle()


def test_an_engine_that_is_told_to_read_from_itself(pair: Pair) -> None:
    wanted = pair.wanted()
    pair.d.step(Receive(wanted, pair.d.address))
    run([pair.d], _has(pair.d, ReceiveFailed))
    assert _failure(pair.d).quiet
    hand_off(pair.p, pair.d, "from another")
    pair.until_idle()


# ---- a keeper in another process


@pytest.fixture(scope="module", autouse=True)
def keepers() -> Iterator[dict[Mode, PeerProcess]]:
    """Started at once, so that they are ready when their turn comes."""
    keepers = {mode: PeerProcess(mode, "keeper") for mode in Mode}
    yield keepers
    for keeper in keepers.values():
        keeper.close()


@pytest.mark.parametrize("mode", Mode)
def test_a_keeper_that_is_stopped_and_then_killed(
    keepers: dict[Mode, PeerProcess], mode: Mode
) -> None:
    keeper = keepers[mode]
    keeper.wait()
    reader = Rank("reader", mode)
    name = TransferId(f"kept-{mode}")
    keeper.keep(name, KEPT.tolist())

    def read() -> None:
        reader.events.clear()
        reader.pages[:] = 0
        wanted = wanted_all(name, TAKEN, Mode.PULL)
        wanted = replace(wanted, want=Want(TOKENS, 0, TOKENS, b""))
        reader.step(Receive(wanted, keeper.address))

    def fails() -> ReceiveFailed:
        run([reader], _has(reader, ReceiveFailed))
        run([reader], lambda: not any(reader.tables.values()))
        assert not _has(reader, Received)()
        return _failure(reader)

    read()
    run([reader], _has(reader, Received))
    assert (reader.pages[:, TAKEN] == KEPT[None, :, None]).all()

    keeper.stop()
    read()
    assert fails().kind is FailureKind.PEER_LOST
    keeper.resume()

    read()
    run([reader], _has(reader, Received))

    # The keeper grants a lease, then dies before it is used.
    read()
    time.sleep(0.3)
    keeper.kill()
    assert fails().kind in (FailureKind.PEER_LOST, FailureKind.TRANSFER)
    reader.close()
