# SPDX-License-Identifier: Apache-2.0
"""Cache tensors as regions of pages."""

import ctypes

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    CacheLayout,
    LayerShape,
    LayoutError,
    MemoryRange,
    describe,
    parts_of_regions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

BLOCKS = 6


def _describe(*caches: torch.Tensor, blocks: int = BLOCKS) -> CacheLayout:
    named = {f"l{i}": cache for i, cache in enumerate(caches)}
    return describe(named, blocks, dict.fromkeys(named, LayerShape()))


def _content(layout: CacheLayout, region: int, block: int) -> bytes:
    info = layout.regions[region]
    return ctypes.string_at(info.address + block * info.stride, info.page_bytes)


def test_a_page_is_where_the_region_says() -> None:
    cache = torch.arange(BLOCKS * 8, dtype=torch.float32).reshape(BLOCKS, 2, 4)
    layout = _describe(cache)
    (region,) = layout.regions
    assert (region.page_bytes, region.stride, region.num_blocks) == (32, 32, BLOCKS)
    for block in range(BLOCKS):
        assert _content(layout, 0, block) == cache[block].numpy().tobytes()
    assert layout.block_bytes == 32
    assert layout.ranges == (MemoryRange(cache.data_ptr(), 32 * BLOCKS, 0),)


def test_layers_interleaved_in_one_allocation_are_registered_once() -> None:
    storage = torch.arange(BLOCKS * 3 * 4, dtype=torch.float32).reshape(BLOCKS, 3, 4)
    layout = _describe(*(storage[:, layer] for layer in range(3)))
    assert {region.stride for region in layout.regions} == {48}
    for layer in range(3):
        assert _content(layout, layer, 2) == storage[2, layer].numpy().tobytes()
    (extent,) = layout.ranges
    assert extent.address == storage.data_ptr()
    assert extent.length >= storage.nbytes


def test_kernel_blocks_are_joined() -> None:
    cache = torch.arange(2 * BLOCKS * 4, dtype=torch.int16).reshape(2 * BLOCKS, 4)
    layout = _describe(cache)
    assert layout.regions[0].page_bytes == 16
    assert _content(layout, 0, 1) == cache[2:4].numpy().tobytes()


def test_a_transposed_page_is_still_one_piece() -> None:
    cache = torch.zeros(BLOCKS, 4, 2).transpose(1, 2)
    assert _describe(cache).regions[0].page_bytes == 32


def test_layers_that_share_a_cache_move_once() -> None:
    cache = torch.zeros(BLOCKS, 4)
    assert [region.layer for region in _describe(cache, cache).regions] == ["l0"]


def test_groups_have_blocks_of_their_own_in_one_cache() -> None:
    cache = torch.zeros(BLOCKS, 4)
    shapes = {"l0": LayerShape(), "l1": LayerShape(group=1)}
    layout = describe({"l0": cache, "l1": cache}, BLOCKS, shapes)
    assert [(r.layer, r.group) for r in layout.regions] == [("l0", 0), ("l1", 1)]
    (extent,) = layout.ranges
    assert extent.length == cache.nbytes


def test_layers_outside_the_groups_are_left_out() -> None:
    caches = {"kept": torch.zeros(BLOCKS, 4), "other": torch.zeros(BLOCKS, 4)}
    layout = describe(caches, BLOCKS, {"kept": LayerShape(group=1)})
    assert [(region.layer, region.group) for region in layout.regions] == [("kept", 1)]


@pytest.mark.parametrize(
    ("cache", "blocks", "said"),
    [
        (torch.zeros(2, BLOCKS, 4).transpose(0, 1), BLOCKS, "in one piece"),
        (torch.zeros(BLOCKS + 1, 4), BLOCKS, "no multiple"),
        (torch.zeros(2 * BLOCKS, 8)[:, :4], BLOCKS, "splits a block"),
        (torch.zeros(BLOCKS, 4), 0, "no multiple"),
    ],
)
def test_what_cannot_be_moved_is_named(
    cache: torch.Tensor, blocks: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=f"'l0'.*{said}"):
        _describe(cache, blocks=blocks)


def test_several_tensors_per_layer_are_refused() -> None:
    with pytest.raises(LayoutError, match="2 cache tensors"):
        describe({"l0": [torch.zeros(1), torch.zeros(1)]}, 1, {"l0": LayerShape()})


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, (0, 0, 0, 0, 0, 0)),
        (2, (0, 0, 0, 0, 1, 1)),
        (3, (0, 0, 0, 0, 1, 2)),
        (9, (0, 0, 1, 1, 2, 3)),
    ],
)
def test_layers_are_divided_in_their_order(
    parts: int, expected: tuple[int, ...]
) -> None:
    names = ("a", "a", "b", "b", "c", "d")
    regions = [RegionInfo(name, 0, 0, 1, 1, 1, 0) for name in names]
    assert parts_of_regions(regions, parts) == expected


def test_no_cache_is_refused() -> None:
    with pytest.raises(LayoutError, match="no layer"):
        describe({"l0": torch.zeros(BLOCKS, 4)}, BLOCKS, {})
