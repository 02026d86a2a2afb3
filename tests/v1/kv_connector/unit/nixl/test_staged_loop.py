# SPDX-License-Identifier: Apache-2.0
"""Transfer loops whose caches are on another device; a fake one, and real NIXL."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    CONFIG,
    LAYERS,
    NUM_BLOCKS,
    PAGE_BYTES,
    PATIENCE_S,
    Rank,
    keep,
    offer,
    request,
    run,
)
from v1.kv_connector.unit.nixl.fake_device import FakeDevice
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import host_buffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Expect,
    Receive,
    Retire,
    Retract,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Retracted,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import new_name
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.host_buffer import HostBuffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    LayerShape,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Pace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staged_loop import StagedLoop
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_loop import TransferLoop
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want

pytestmark = pytest.mark.timeout(90)

T = TransferId("t")


def _ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int32)


HERE, THERE = _ids(9, 8, 3), _ids(20, 21, 7)


class StagedRank(Rank):
    """A rank whose caches are a device's."""

    def __init__(self, engine_id: str, mode: Mode) -> None:
        self.device = FakeDevice()
        self.caches = {
            f"layer{index}": torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8)
            for index in range(LAYERS)
        }
        self.buffer = HostBuffer(self.caches, self.device.record, self.device.stream)
        self.buffer.use(self.device.copy)
        super().__init__(engine_id, mode)

    def _make_loop(self, token: Token | None) -> TransferLoop:
        shapes = {name: LayerShape() for name in self.caches}
        layout = describe(self.buffer.host, NUM_BLOCKS, shapes)
        self.buffer.bind(layout.regions)
        self.agent.register(layout.ranges, "DRAM")
        self.info = msgspec.structs.replace(
            self.info, regions=layout.regions, agent_metadata=self.agent.metadata()
        )
        return StagedLoop(
            CONFIG,
            self.agent,
            self.info,
            self.mode,
            token,
            self._take,
            time.monotonic,
            self.buffer,
        )

    def end(self, patience: float) -> None:
        """The engine ends, and gives what is computed so long."""
        self._server.close()
        self.loop.close(patience)

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        for cache in self.caches.values():
            cache.random_(1, 256)

    def has(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


class Pair:
    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.p, self.d = StagedRank("prefill", mode), StagedRank("decode", mode)
        self.p.fill(1)

    def until(self, condition: Callable[[], bool]) -> None:
        run([self.p, self.d], condition)

    def for_a_while(self) -> None:
        end = time.monotonic() + 0.3
        self.until(lambda: time.monotonic() > end)

    def until_idle(self) -> None:
        def idle() -> bool:
            return not any((*self.p.tables.values(), *self.d.tables.values()))

        self.until(idle)

    def same(self, here: BlockArray = HERE, there: BlockArray = THERE) -> bool:
        return all(
            torch.equal(self.p.caches[name][here], self.d.caches[name][there])
            for name in self.p.caches
        )

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


def test_what_moves_is_copied_on_both_sides_and_nothing_else(pair: Pair) -> None:
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(request(T, THERE, pair.mode), pair.p.address))
    pair.until(lambda: pair.d.has(Received) and pair.p.has(SenderClosed))
    assert pair.same()
    rest = sorted(set(range(NUM_BLOCKS)) - set(THERE.tolist()))
    assert not any(cache[rest].any() for cache in pair.d.caches.values())
    for layer in pair.p.caches:
        assert pair.p.device.blocks("d2h", layer) == HERE.tolist()
        assert pair.d.device.blocks("h2d", layer) == THERE.tolist()
    assert {way for way, *_ in pair.p.device.copied} == {"d2h"}
    assert {way for way, *_ in pair.d.device.copied} == {"h2d"}
    pair.until_idle()


def test_one_side_alone_may_stage(pair: Pair) -> None:
    plain = Rank("plain", pair.mode)
    plain.pages[:] = np.random.default_rng(3).integers(0, 256, plain.pages.shape)
    plain.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(request(T, THERE, pair.mode), plain.address))
    run([plain, pair.d], lambda: pair.d.has(Received))
    for index, cache in enumerate(pair.d.caches.values()):
        assert np.array_equal(cache[THERE].numpy(), plain.pages[index, HERE])
    plain.close()


def test_nothing_is_copied_before_it_is_computed(pair: Pair) -> None:
    passed = False
    given = replace(offer(T, HERE), fence=lambda: passed)
    for cache in pair.p.caches.values():
        cache.zero_()
    pair.p.step(Expect(T, 1, ()), given)
    pair.d.step(Receive(request(T, THERE, pair.mode), pair.p.address))
    pair.for_a_while()
    assert pair.p.device.copied == []
    assert pair.p.tables["staging_out"] == 1

    pair.p.fill(2)
    passed = True
    pair.until(lambda: pair.d.has(Received))
    assert pair.same()


def test_it_is_told_when_it_is_on_the_device(pair: Pair) -> None:
    pair.d.device.held = True
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(request(T, THERE, pair.mode), pair.p.address))
    pair.until(lambda: len(pair.d.device.copied) == LAYERS)
    pair.for_a_while()
    assert not pair.d.has(Received)
    assert pair.d.tables["staging_in"] == 1

    pair.d.device.go_on()
    pair.until(lambda: pair.d.has(Received))
    assert pair.same()


def test_a_receiver_that_is_cancelled_is_quiet_when_its_copy_is_over(
    pair: Pair,
) -> None:
    pair.d.device.held = True
    wanted = request(T, THERE, pair.mode)
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(wanted, pair.p.address))
    pair.until(lambda: len(pair.d.device.copied) == LAYERS)
    pair.d.step(CancelReceive(wanted.registration_id, "gone"))
    pair.for_a_while()
    assert not pair.d.has(ReceiveQuiet)

    pair.d.device.go_on()
    pair.until(lambda: pair.d.has(ReceiveQuiet))
    kinds = [type(event) for event in pair.d.events]
    assert kinds == [Received, ReceiveQuiet]
    pair.until_idle()


def test_what_fails_is_not_copied(push: Pair) -> None:
    wanted = request(T, THERE, Mode.PUSH)
    push.d.step(Receive(wanted, push.p.address))
    push.p.step(Withdraw(T, "aborted"))
    push.until(lambda: push.d.has(ReceiveFailed))
    assert push.d.device.copied == []
    push.until_idle()


@pytest.mark.parametrize("order", [Retract(T, 1), Withdraw(T, "aborted")])
def test_blocks_are_given_back_when_no_copy_reads_them(
    push: Pair, monkeypatch: pytest.MonkeyPatch, order: Retract | Withdraw
) -> None:
    monkeypatch.setattr(host_buffer, "PIECE_BYTES", PAGE_BYTES)
    passed = False
    given = replace(offer(T, HERE), fence=lambda: passed)
    push.p.step(Expect(T, 1, ()), given)
    push.p.step(order)
    push.for_a_while()
    assert push.p.events == []

    passed = True
    over = Retracted if isinstance(order, Retract) else SenderClosed

    def given_back() -> bool:
        if not push.p.has(over):
            return False
        assert push.p.device.blocks("d2h", "layer1") == HERE.tolist()
        return True

    push.until(given_back)


def test_kept_kv_is_copied_when_it_is_asked_for_and_once(pair: Pair) -> None:
    """P reads what D keeps, here of its last two blocks first."""
    pair.d.fill(4)
    name = new_name()
    pair.d.step(keep(name, THERE))
    pair.for_a_while()
    assert pair.d.device.copied == []

    tokens = len(THERE) * BLOCK_TOKENS
    tail = Want(tokens, BLOCK_TOKENS, tokens - BLOCK_TOKENS, b"")
    wanted = replace(request(name, HERE[1:], Mode.PULL), want=tail)
    pair.p.step(Receive(wanted, pair.d.address))
    pair.until(lambda: pair.p.has(Received))
    assert pair.same(HERE[1:], THERE[1:])
    assert pair.d.device.blocks("d2h", "layer0") == THERE[1:].tolist()

    whole = replace(request(name, HERE, Mode.PULL), want=Want(tokens, 0, tokens, b""))
    pair.p.step(Receive(whole, pair.d.address))
    pair.until(lambda: len(pair.p.events) == 2)
    assert pair.same()
    assert sorted(pair.d.device.blocks("d2h", "layer0")) == sorted(THERE.tolist())
    pair.d.step(Retire(name))
    pair.until(lambda: pair.d.has(SenderClosed))
    pair.until_idle()
    assert isinstance(pair.d.loop, StagedLoop)
    assert not pair.d.loop._kept_here


def test_a_copy_to_the_host_that_fails_is_told_to_the_receiver(pair: Pair) -> None:
    pair.p.device.failing = "d2h"
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(request(T, THERE, pair.mode), pair.p.address))
    pair.until(lambda: pair.d.has(ReceiveFailed) and pair.p.has(SenderClosed))
    (failed,) = pair.d.events
    assert isinstance(failed, ReceiveFailed)
    assert "the device has gone" in failed.reason
    pair.until_idle()


def test_a_reader_of_kept_kv_is_told_too(pair: Pair) -> None:
    pair.d.device.failing = "d2h"
    name = new_name()
    pair.d.step(keep(name, THERE))
    tokens = len(THERE) * BLOCK_TOKENS
    whole = replace(request(name, HERE, Mode.PULL), want=Want(tokens, 0, tokens, b""))
    pair.p.step(Receive(whole, pair.d.address))
    pair.until(lambda: pair.p.has(ReceiveFailed))
    pair.d.step(Retire(name))
    pair.until_idle()


def test_a_copy_to_the_device_that_fails_fails_the_attempt(pair: Pair) -> None:
    pair.d.device.failing = "h2d"
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.d.step(Receive(request(T, THERE, pair.mode), pair.p.address))
    pair.until(lambda: pair.d.has(ReceiveFailed))
    (failed,) = pair.d.events
    assert isinstance(failed, ReceiveFailed)
    assert failed.kind is FailureKind.TRANSFER
    assert failed.quiet
    assert "the device has gone" in failed.reason
    pair.until_idle()


def test_what_is_being_copied_when_an_engine_ends_is_handed_over() -> None:
    pair = Pair(Mode.PUSH)
    pair.d.step(Receive(request(T, THERE, Mode.PUSH), pair.p.address))
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    looks = iter([False] * 5)
    given = replace(offer(T, HERE), fence=lambda: next(looks, True))
    pair.p.step(Expect(T, 1, ()), given)
    assert pair.p.device.copied == []
    ending = threading.Thread(target=pair.p.end, args=(5.0,))
    ending.start()
    run([pair.d], lambda: bool(pair.d.events))
    ending.join(PATIENCE_S)
    assert [type(event) for event in pair.d.events] == [Received]
    assert pair.same()
    pair.d.close()


def test_the_next_step_is_worth_taking_while_something_is_copied(push: Pair) -> None:
    assert push.p.loop.step(()) is not Pace.NOW
    push.p.step(Expect(T, 1, ()), replace(offer(T, HERE), fence=lambda: False))
    assert push.p.loop.step(()) is Pace.NOW
