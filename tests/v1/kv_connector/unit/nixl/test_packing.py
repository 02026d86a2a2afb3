# SPDX-License-Identifier: Apache-2.0
"""Pages as the CPU attention kernels write them, and where tokens are in them."""

import ctypes

import msgspec
import pytest
import torch

from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    LayerShape,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pairing import (
    PairingError,
    shared_pieces,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.packing import CpuPacking
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        current_platform.device_type != "cpu", reason="needs the CPU kernels"
    ),
]

HEADS, SIZE, TOKENS = 2, 32, 128
PACKINGS = [
    CpuPacking("vec", SIZE, torch.float32, torch.float32, "auto"),
    CpuPacking("vec", SIZE, torch.bfloat16, torch.bfloat16, "auto"),
    CpuPacking("vec16", SIZE, torch.bfloat16, torch.bfloat16, "auto"),
    CpuPacking("vec", SIZE, torch.bfloat16, torch.uint8, "fp8"),
    # The kernel that packs for AMX packs without it, too.
    CpuPacking("amx", SIZE, torch.bfloat16, torch.bfloat16, "auto"),
]


def _filled(packing: CpuPacking, tokens: int) -> torch.Tensor:
    """A cache of pages for ``tokens`` tokens each, written by the kernel."""
    generator = torch.Generator().manual_seed(1)
    shape = (TOKENS, HEADS, SIZE)
    keys, values = (
        torch.rand(shape, generator=generator).to(packing.dtype) for _ in range(2)
    )
    cache = torch.zeros(
        TOKENS // tokens, HEADS, tokens, 2 * SIZE, dtype=packing.cache_dtype
    )
    halves = cache.view(len(cache), HEADS, 2 * tokens, SIZE).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys,
        values,
        *halves,
        torch.arange(TOKENS),
        packing.isa,
        kv_cache_dtype=packing.cache_dtype_name,
    )
    return cache


def _region(cache: torch.Tensor, packing: CpuPacking) -> RegionInfo:
    shape = LayerShape(
        tokens=cache.shape[2], heads=HEADS, model_heads=HEADS, packing=packing.planes
    )
    (region,) = describe({"l": cache}, len(cache), {"l": shape}).regions
    return region


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: f"{p.isa}-{p.cache_dtype}")
@pytest.mark.parametrize(("mine", "theirs"), [(32, 64), (64, 32), (128, 32)])
def test_pages_of_one_size_become_pages_of_another(
    packing: CpuPacking, mine: int, theirs: int
) -> None:
    source, wanted = _filled(packing, mine), _filled(packing, theirs)
    target = torch.zeros_like(wanted)
    here, there = _region(source, packing), _region(target, packing)
    pieces = shared_pieces(here, there, (0, 0, HEADS))
    assert pieces.unit == min(mine, theirs)
    for unit in range(TOKENS // pieces.unit):
        page, part = divmod(unit, len(pieces.local))
        other, place = divmod(unit, len(pieces.remote))
        for index, length in enumerate(pieces.lengths):
            ctypes.memmove(
                there.address + other * there.stride + int(pieces.remote[place, index]),
                here.address + page * here.stride + int(pieces.local[part, index]),
                int(length),
            )
    assert torch.equal(target.view(torch.uint8), wanted.view(torch.uint8))
    assert not torch.equal(source.flatten(), wanted.flatten())


def test_the_kernels_keep_values_in_the_order_of_tokens() -> None:
    keys, values = PACKINGS[0].planes(64, 64 * 2 * SIZE * 4)
    assert (keys.rows, keys.granule, keys.granule_bytes) == (SIZE, 1, 4)
    assert (values.rows, values.granule, values.granule_bytes) == (1, 1, 4 * SIZE)


def test_packed_tokens_are_not_divided() -> None:
    """What is packed by 16 tokens cannot be taken apart into eights."""
    region = _region(_filled(PACKINGS[-1], 32), PACKINGS[-1])
    small = RegionInfo(
        "l", 0, 0, region.page_bytes // 4, region.page_bytes // 4, 9, 0, 8, HEADS, HEADS
    )
    with pytest.raises(PairingError, match="does not let the tokens"):
        shared_pieces(region, small, (0, 0, HEADS))
    keys, values = region.planes
    assert keys.granule == 16
    assert keys.order
    replace = msgspec.structs.replace
    eights = replace(
        small,
        lanes=HEADS,
        planes=(
            replace(keys, granule=8, granule_bytes=8 * SIZE * 2),
            replace(values, offset=8 * SIZE * 2, row_stride=8 * SIZE),
        ),
    )
    with pytest.raises(PairingError, match="packed by 16"):
        shared_pieces(region, eights, (0, 0, HEADS))


def test_a_lane_of_another_size_is_not_understood() -> None:
    assert PACKINGS[0].planes(32, 100) == ()
