# SPDX-License-Identifier: Apache-2.0
"""Two real transfer loops over real NIXL and a real side channel, step by step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from v1.kv_connector.unit.nixl import arena
from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    LAYERS,
    PAGE_BYTES,
    Rank,
    free_address,
    hand_off,
    offer,
    request,
    run,
)
from v1.kv_connector.unit.nixl.peer_process import PeerProcess
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Expect,
    Receive,
    Retract,
    TellNotNeeded,
    Unwatch,
    Watch,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Event,
    FailureKind,
    Offer,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Retracted,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Pace, PendingOffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

pytestmark = pytest.mark.timeout(90)

T = TransferId("t")


def _ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int32)


HERE, THERE = _ids(9, 8, 3, 4), _ids(20, 21, 22, 7)


class Pair:
    """A prefill rank P and a decode rank D."""

    def __init__(self, mode: Mode) -> None:
        self.p = Rank("prefill", mode)
        self.d = Rank("decode", mode)
        rng = np.random.default_rng(1)
        self.p.pages[:] = rng.integers(1, 256, self.p.pages.shape)

    def receive(self, transfer_id: TransferId = T) -> ReceiveRequest:
        wanted = request(transfer_id, THERE, self.d.mode)
        self.d.step(Receive(wanted, self.p.address))
        return wanted

    def until(self, condition: Callable[[], bool]) -> None:
        run([self.p, self.d], condition)

    def until_idle(self) -> None:
        self.until(lambda: not any((*self.p.tables.values(), *self.d.tables.values())))

    def moved(self) -> bool:
        return np.array_equal(self.p.pages[:, HERE], self.d.pages[:, THERE])

    def untouched(self) -> bool:
        return not self.d.pages.any()

    def close(self) -> None:
        self.d.close()
        self.p.close()


@pytest.fixture(params=Mode)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def push() -> Iterator[Pair]:
    pair = Pair(Mode.PUSH)
    yield pair
    pair.close()


def _failures(rank: Rank) -> list[ReceiveFailed]:
    return [event for event in rank.events if isinstance(event, ReceiveFailed)]


def _closed(rank: Rank) -> list[SenderClosed]:
    return [event for event in rank.events if isinstance(event, SenderClosed)]


def _has(rank: Rank, kind: type[Event]) -> Callable[[], bool]:
    return lambda: any(isinstance(event, kind) for event in rank.events)


def test_kv_moves_when_the_offer_comes_first(pair: Pair) -> None:
    hand_off(pair.p, pair.d, "t")
    pair.until_idle()
    hand_off(pair.p, pair.d, "t2")
    pair.until_idle()


def test_kv_moves_when_the_decode_request_comes_first(pair: Pair) -> None:
    wanted = pair.receive()
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    pair.p.step(Expect(T, 1, ()))
    assert pair.untouched()
    pair.p.step(offer(T, HERE))
    pair.until(_has(pair.d, Received))
    assert pair.moved()
    pair.until_idle()
    (received,) = pair.d.events
    assert isinstance(received, Received)
    assert received.registration_id == wanted.registration_id
    assert received.size.bytes == len(HERE) * LAYERS * PAGE_BYTES
    (closed,) = _closed(pair.p)
    assert (closed.reason, closed.tokens) == (CloseReason.SERVED, received.tokens)


def test_nothing_moves_before_it_is_computed(pair: Pair) -> None:
    pair.receive()
    computed = False
    pending = PendingOffer(offer(T, HERE).offer, lambda: computed)
    pair.p.step(Expect(T, 1, ()), pending)
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    for _ in range(20):
        pair.p.step()
        pair.d.step()
    assert pair.untouched()
    computed = True
    pair.until(_has(pair.d, Received))
    assert pair.moved()


def _chunk(first: int, last: int, generation: int = 1) -> PendingOffer:
    tokens = len(HERE) * BLOCK_TOKENS
    chunk = Offer(
        T,
        generation,
        tokens,
        b"digest",
        (HERE[first:last],),
        first,
        tokens - last * BLOCK_TOKENS,
    )
    return PendingOffer(chunk, lambda: True)


def test_chunks_move_as_they_are_computed(push: Pair) -> None:
    push.receive()
    push.p.step(Expect(T, 1, ()))
    for index in range(len(HERE)):
        assert push.d.events == []
        push.p.step(_chunk(index, index + 1))

        def here(index: int = index) -> bool:
            mine = push.p.pages[:, HERE[: index + 1]]
            return bool(np.array_equal(mine, push.d.pages[:, THERE[: index + 1]]))

        push.until(here)
    push.until(_has(push.d, Received))
    (received,) = push.d.events
    assert isinstance(received, Received)
    assert received.size.bytes == len(HERE) * LAYERS * PAGE_BYTES
    push.until_idle()


def test_a_preempted_prompt_moves_on_from_other_blocks(push: Pair) -> None:
    push.receive()
    push.p.step(Expect(T, 1, ()), _chunk(0, 2))
    push.until(lambda: bool(push.d.pages[:, THERE[1]].any()))
    push.p.step(Retract(T, 1))
    push.until(_has(push.p, Retracted))
    # Other tokens are computed into what was given away.
    computed = push.p.pages[:, HERE].copy()
    push.p.pages[:, HERE[:2]] = 0
    push.p.step(_chunk(0, len(HERE), generation=2))
    push.until(_has(push.d, Received))
    assert np.array_equal(push.d.pages[:, THERE], computed)
    push.until_idle()


def test_long_transfers_go_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = PAGE_BYTES * LAYERS
    monkeypatch.setattr(
        arena, "CONFIG", replace(arena.CONFIG, max_transfer_bytes=block)
    )
    # Neighbours on both sides, which would merge within one piece.
    here = _ids(3, 4, 5, 6)
    for mode in Mode:
        pair = Pair(mode)
        pair.receive()
        pair.p.step(Expect(T, 1, ()), offer(T, here))
        pair.until(_has(pair.d, Received))
        assert np.array_equal(pair.p.pages[:, here], pair.d.pages[:, THERE])
        (received,) = pair.d.events
        assert isinstance(received, Received)
        assert received.size.bytes == len(here) * block
        assert received.size.descriptors == len(here) * LAYERS
        pair.until_idle()
        pair.close()


def test_several_receivers_are_served(pair: Pair) -> None:
    # Made first: it takes a while, and the lease runs from the offer on.
    second = Rank("decode2", pair.p.mode)
    pair.p.step(Expect(T, 2, ()), offer(T, HERE))
    pair.receive()
    pair.until(_has(pair.d, Received))
    assert _closed(pair.p) == []
    second.step(Receive(request(T, THERE, second.mode), pair.p.address))
    run([pair.p, pair.d, second], _has(second, Received))
    assert np.array_equal(pair.d.pages[:, THERE], second.pages[:, THERE])
    run([pair.p, pair.d, second], lambda: len(_closed(pair.p)) == 1)
    pair.until_idle()
    second.close()


def test_a_cancelled_receive_is_quiet_soon(pair: Pair) -> None:
    wanted = pair.receive()
    pair.p.step(Expect(T, 1, ()))
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    pair.d.step(CancelReceive(wanted.registration_id, "aborted"))
    pair.until(lambda: pair.p.tables["sender_claims"] == 0)
    pair.until(lambda: not any(pair.d.tables.values()))
    (failed,) = _failures(pair.d)
    assert failed.kind is FailureKind.CANCELLED
    assert failed.quiet or _has(pair.d, ReceiveQuiet)()
    pair.p.step(offer(T, HERE))
    pair.until(_has(pair.p, SenderClosed))
    assert _closed(pair.p)[0].reason is CloseReason.RELEASED
    assert pair.untouched()


def test_a_withdrawn_prompt_fails_its_receiver(pair: Pair) -> None:
    pair.receive()
    pair.p.step(Expect(T, 1, ()))
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    pair.p.step(Withdraw(T, "the prefill request was aborted"))
    pair.until(_has(pair.d, ReceiveFailed))
    (failed,) = _failures(pair.d)
    assert (failed.kind, failed.quiet) == (FailureKind.REFUSED, True)
    assert "aborted" in failed.reason
    pair.until_idle()


def test_other_prompts_are_refused(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()), offer(T, HERE[:3]))
    pair.receive()
    pair.until(_has(pair.d, ReceiveFailed))
    (failed,) = _failures(pair.d)
    assert "64 tokens, the prefill prompt 48" in failed.reason
    assert pair.untouched()
    pair.until_idle()


def test_what_is_not_needed_is_let_go(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(TellNotNeeded(T, pair.p.address, 1))
    pair.until(_has(pair.p, SenderClosed))
    assert _closed(pair.p)[0].reason is CloseReason.RELEASED
    pair.until_idle()


def test_kv_that_is_waited_for_outlives_its_lease(push: Pair) -> None:
    push.d.step(Watch(T, push.p.address))
    push.p.step(Expect(T, 1, ()), offer(T, HERE))
    end = time.monotonic() + 1.5 * arena.CONFIG.kv_lease_duration
    push.until(lambda: time.monotonic() > end)
    assert _closed(push.p) == []
    push.d.step(Unwatch(T))
    push.until(_has(push.p, SenderClosed))
    assert _closed(push.p)[0].reason is CloseReason.EXPIRED
    push.until_idle()


def test_an_engine_that_is_not_there_fails_the_attempt() -> None:
    rank = Rank("decode", Mode.PUSH)
    rank.step(Receive(request(T, THERE, rank.mode), free_address()))
    run([rank], _has(rank, ReceiveFailed))
    (failed,) = _failures(rank)
    assert (failed.kind, failed.quiet) == (FailureKind.UNREACHABLE, True)
    assert "handshake_timeout" in failed.reason
    assert not any(rank.tables.values())
    rank.close()


def test_a_peer_that_takes_its_leave_is_forgotten(pair: Pair) -> None:
    pair.receive()
    pair.p.step(Expect(T, 1, ()))
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    leaver, other = pair.p, pair.d
    leaver.close()
    run([other], _has(other, ReceiveFailed))
    (failed,) = _failures(other)
    assert "shut down" in failed.reason
    run([other], lambda: not any(other.tables.values()))
    pair.p = Rank("prefill", other.mode)
    hand_off(pair.p, pair.d, "again")


def test_an_idle_loop_is_relaxed(pair: Pair) -> None:
    assert pair.d.loop.step(()) is Pace.RELAXED
    wanted = pair.receive()
    assert pair.d.loop.step(()) is not Pace.RELAXED
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    pair.d.step(CancelReceive(wanted.registration_id, "aborted"))
    pair.until_idle()
    assert pair.d.loop.step(()) is Pace.RELAXED


@pytest.mark.parametrize(
    ("mode", "expected", "offered"),
    [
        (Mode.PUSH, Pace.LATER, Pace.SOON),
        (Mode.PULL, Pace.RELAXED, Pace.STEADY),
    ],
)
def test_what_is_pulled_is_not_looked_for_before_it_is_computed(
    mode: Mode, expected: Pace, offered: Pace
) -> None:
    rank = Rank("prefill", mode)
    try:
        rank.step(Expect(T, 1, ()))
        assert rank.loop.step(()) is expected
        rank.step(arena.offer(T, np.arange(2, dtype=np.int32)))
        assert rank.loop.step(()) is offered
    finally:
        rank.close()


# ---- a peer in another process


@pytest.fixture(scope="module", autouse=True)
def peers() -> Iterator[dict[Mode, PeerProcess]]:
    """Started at once, so that they are ready when their turn comes."""
    peers = {mode: PeerProcess(mode, "peer") for mode in Mode}
    yield peers
    for peer in peers.values():
        peer.close()


@pytest.mark.parametrize("mode", Mode)
def test_a_peer_that_is_stopped_and_then_killed(
    peers: dict[Mode, PeerProcess], mode: Mode
) -> None:
    peer = peers[mode]
    peer.wait()
    survivor = Rank("survivor", mode)
    _hand_off_from(peer, survivor, TransferId("before"))

    _stop_while_it_owes_kv(peer, survivor)
    peer.resume()
    run([survivor], lambda: not any(survivor.tables.values()))
    survivor.pages[:] = 0
    _hand_off_from(peer, survivor, TransferId("after"))

    survivor.step(Expect(TransferId("given"), 1, ()))
    peer.receive(TransferId("given"), THERE.tolist(), survivor.address[1])
    peer.expect(TransferId("taken"))
    survivor.step(
        Receive(request(TransferId("taken"), THERE, survivor.mode), peer.address)
    )
    run([survivor], lambda: survivor.tables["sender_claims"] == 1)
    survivor.events.clear()
    peer.kill()
    run([survivor], lambda: survivor.tables["receiver_attempts"] == 0)
    run([survivor], lambda: survivor.tables["sender_claims"] == 0)
    survivor.step(offer(TransferId("given"), HERE))
    run([survivor], lambda: not any(survivor.tables.values()))
    (failed,) = _failures(survivor)
    assert failed.kind is FailureKind.PEER_LOST
    assert failed.quiet or _has(survivor, ReceiveQuiet)()
    assert len(_closed(survivor)) == 1
    survivor.close()


def _hand_off_from(peer: PeerProcess, rank: Rank, transfer_id: TransferId) -> None:
    rank.events.clear()
    peer.expect(transfer_id)
    peer.offer(transfer_id, HERE.tolist())
    rank.step(Receive(request(transfer_id, THERE, rank.mode), peer.address))
    run([rank], lambda: bool(rank.events))
    assert _has(rank, Received)(), rank.events
    assert (rank.pages[:, THERE] == HERE[None, :, None]).all()
    rank.events.clear()


def _stop_while_it_owes_kv(peer: PeerProcess, rank: Rank) -> None:
    transfer_id = TransferId("owed")
    peer.expect(transfer_id)
    rank.step(Receive(request(transfer_id, THERE, rank.mode), peer.address))
    for _ in range(50):
        rank.step()
        time.sleep(0.004)
    peer.stop()
    run([rank], _has(rank, ReceiveFailed))
    (failed,) = _failures(rank)
    assert failed.kind is FailureKind.PEER_LOST
    # A writer may still write until it says that it does not.
    assert failed.quiet is (rank.mode is Mode.PULL)
    end = time.monotonic() + 1
    run([rank], lambda: time.monotonic() > end)
    assert rank.tables["receiver_quiescing"] == (rank.mode is Mode.PUSH)


def test_a_hand_off_of_which_nothing_is_kept_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All blocks have left the window: there is nothing to write, and that is told."""
    monkeypatch.setattr(arena, "RegionInfo", partial(RegionInfo, window=1))
    pair = Pair(Mode.PUSH)
    try:
        none = np.zeros(2, dtype=np.int32)
        # The last token is computed by D; it keeps no block before that one.
        tokens = 2 * BLOCK_TOKENS
        wanted = replace(
            request(T, none, Mode.PUSH),
            want=Want(tokens + 1, 0, tokens, b"digest"),
        )
        given = Offer(T, 1, tokens + 1, b"digest", (none,), missing_tokens=1)
        pair.p.step(Expect(T, 1, ()), PendingOffer(given, lambda: True))
        pair.d.step(Receive(wanted, pair.p.address))
        pair.until(lambda: any(isinstance(e, Received) for e in pair.d.events))
        (event,) = (e for e in pair.d.events if isinstance(e, Received))
        assert event.size.bytes == 0
    finally:
        pair.p.close()
        pair.d.close()
