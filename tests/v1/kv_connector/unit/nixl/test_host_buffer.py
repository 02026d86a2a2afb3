# SPDX-License-Identifier: Apache-2.0
"""The copy of the caches on the host, and the ways there and back."""

import time

import numpy as np
import pytest
import torch

from v1.kv_connector.unit.nixl.fake_device import FakeDevice
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import host_buffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.host_buffer import (
    BlockCopy,
    HostBuffer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    LayerShape,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray

NUM_BLOCKS, HEADS, TOKENS, SIZE = 8, 2, 4, 6


def _ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int32)


def _layers(across: bool) -> dict[str, torch.Tensor]:
    """Caches of two layers: each its own, or the layers of a block side by side."""
    shape = (NUM_BLOCKS, HEADS, TOKENS, SIZE)
    if not across:
        return {f"l{i}": torch.rand(shape) for i in range(2)}
    whole = torch.rand(NUM_BLOCKS, 2, *shape[1:])
    return {f"l{i}": whole[:, i] for i in range(2)}


def _buffer(
    caches: dict[str, torch.Tensor],
    device: FakeDevice,
    num_blocks: int = NUM_BLOCKS,
    shapes: dict[str, LayerShape] | None = None,
) -> HostBuffer:
    buffer = HostBuffer(caches, device.record, device.stream)
    known = shapes or {name: LayerShape(tokens=TOKENS) for name in caches}
    buffer.bind(describe(buffer.host, num_blocks, known).regions)
    buffer.use(device.copy)
    return buffer


def _finish(copy: BlockCopy) -> None:
    assert copy.advance(time.monotonic() + 60)


@pytest.mark.parametrize("across", [False, True])
def test_it_lies_as_the_caches_do_and_elsewhere(across: bool) -> None:
    caches = _layers(across)
    buffer = _buffer(caches, FakeDevice())
    shapes = {name: LayerShape(tokens=TOKENS) for name in caches}
    for mine, theirs in zip(
        describe(buffer.host, NUM_BLOCKS, shapes).regions,
        describe(caches, NUM_BLOCKS, shapes).regions,
        strict=True,
    ):
        assert (mine.stride, mine.page_bytes) == (theirs.stride, theirs.page_bytes)
        assert mine.address != theirs.address
    storages = {t.untyped_storage().data_ptr() for t in buffer.host.values()}
    assert len(storages) == (1 if across else 2)


@pytest.mark.parametrize("across", [False, True])
def test_the_blocks_that_are_named_go_there_and_back(across: bool) -> None:
    caches, device = _layers(across), FakeDevice()
    before = {name: cache.clone() for name, cache in caches.items()}
    buffer = _buffer(caches, device)

    _finish(buffer.out_of_device([_ids(5, 2)]))
    for name, cache in caches.items():
        assert torch.equal(buffer.host[name][[5, 2]], before[name][[5, 2]])
        assert not buffer.host[name][[0, 1, 3, 4, 6, 7]].any()
        cache.zero_()
    _finish(buffer.into_device([_ids(2)]))
    for name, cache in caches.items():
        assert torch.equal(cache[2], before[name][2])
        assert not cache[[0, 1, 3, 4, 5, 6, 7]].any()


def test_a_part_of_the_layers_is_copied_alone() -> None:
    caches, device = _layers(across=False), FakeDevice()
    buffer = _buffer(caches, device)
    _finish(buffer.out_of_device([_ids(3)], part=1, parts=2))
    assert device.copied == [("d2h", "l1", (3,))]


def test_a_block_is_all_its_kernel_blocks() -> None:
    caches, device = _layers(across=False), FakeDevice()
    buffer = _buffer(caches, device, num_blocks=NUM_BLOCKS // 2)
    _finish(buffer.out_of_device([_ids(3, 0)]))
    assert device.blocks("d2h", "l0") == [6, 7, 0, 1]


def test_groups_have_their_own_blocks_and_what_left_a_window_stays() -> None:
    caches, device = _layers(across=False), FakeDevice()
    shapes = {
        "l0": LayerShape(group=0, tokens=TOKENS),
        "l1": LayerShape(group=1, tokens=TOKENS, window=5),
    }
    buffer = _buffer(caches, device, shapes=shapes)
    _finish(buffer.into_device([_ids(1, 2, 3), _ids(0, 0, 4)]))
    assert device.blocks("h2d", "l0") == [1, 2, 3]
    assert device.blocks("h2d", "l1") == [4]


def test_it_is_copied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, device = _layers(across=False), FakeDevice()
    page = caches["l0"][0].nbytes
    monkeypatch.setattr(host_buffer, "PIECE_BYTES", 2 * page)
    copy = _buffer(caches, device).out_of_device([_ids(1, 2, 3)])
    over = time.monotonic() - 1
    pieces = [("l0", (1, 2)), ("l0", (3,)), ("l1", (1, 2)), ("l1", (3,))]
    for count in range(1, 5):
        assert not copy.advance(over)
        assert [piece[1:] for piece in device.copied] == pieces[:count]
    assert copy.advance(over)


def test_what_is_launched_is_waited_for() -> None:
    caches, device = _layers(across=False), FakeDevice()
    device.held = True
    copy = _buffer(caches, device).into_device([_ids(1)])
    later = time.monotonic() + 60
    assert not copy.advance(later)
    device.go_on()
    assert copy.advance(later)


def test_a_failure_is_told_when_nothing_is_under_way() -> None:
    caches, device = _layers(across=False), FakeDevice()
    device.held = True
    copy = _buffer(caches, device).into_device([_ids(1)])
    over = time.monotonic() - 1
    assert not copy.advance(over)
    device.failing = "h2d"
    assert not copy.advance(over)
    assert not copy.advance(over)
    device.go_on()
    with pytest.raises(RuntimeError, match="the device has gone"):
        copy.advance(over)
    assert device.copied == [("h2d", "l0", (1,))]


class _Platform:
    """The operations of a platform, as those of the base's do it."""

    @staticmethod
    def swap_out_blocks_to_host(
        source: torch.Tensor,
        target: torch.Tensor,
        source_blocks: torch.Tensor,
        target_blocks: torch.Tensor,
    ) -> None:
        target[target_blocks] = source[source_blocks]

    insert_blocks_to_device = swap_out_blocks_to_host


@pytest.mark.parametrize("across", [False, True])
def test_the_operation_that_the_engine_gives_copies_what_is_named(
    monkeypatch: pytest.MonkeyPatch, across: bool
) -> None:
    monkeypatch.setattr(utils, "current_platform", _Platform)
    caches = _layers(across)
    before = {name: cache.clone() for name, cache in caches.items()}
    buffer = _buffer(caches, FakeDevice())
    buffer.use(utils.copy_kv_blocks)
    _finish(buffer.out_of_device([_ids(5, 2)]))
    for cache in caches.values():
        cache.zero_()
    _finish(buffer.into_device([_ids(2, 5)]))
    for name, cache in caches.items():
        assert torch.equal(cache[[2, 5]], before[name][[2, 5]])
        assert not cache[[0, 1, 3, 4, 6, 7]].any()


def test_an_engine_that_gives_no_operation_is_told() -> None:
    caches, device = _layers(across=False), FakeDevice()
    buffer = HostBuffer(caches, device.record, device.stream)
    shapes = {name: LayerShape(tokens=TOKENS) for name in caches}
    buffer.bind(describe(buffer.host, NUM_BLOCKS, shapes).regions)
    with pytest.raises(RuntimeError, match="no operation"):
        buffer.out_of_device([_ids(1)]).advance(time.monotonic() + 60)
