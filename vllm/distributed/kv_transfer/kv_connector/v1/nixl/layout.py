# SPDX-License-Identifier: Apache-2.0
"""Where the KV of a block lies: cache tensors described as regions of pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .wire.ranks import Plane, RegionInfo


class LayoutError(ValueError):
    """A cache tensor whose blocks cannot be moved as contiguous pages."""


@dataclass(frozen=True)
class MemoryRange:
    """``length`` bytes at ``address``, to be registered with NIXL."""

    address: int
    length: int
    device_id: int


@dataclass(frozen=True)
class Row:
    """``count`` descriptors of ``length`` bytes, ``stride`` bytes apart."""

    address: int
    length: int
    device_id: int
    stride: int
    count: int


@dataclass(frozen=True)
class CacheLayout:
    """The regions of one worker and the memory that they lie in."""

    regions: tuple[RegionInfo, ...]
    ranges: tuple[MemoryRange, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(region.page_bytes for region in self.regions)


def dense(tokens: int, lane_bytes: int) -> tuple[Plane, ...]:
    """Tokens that follow each other in a lane, each in one piece."""
    return (Plane(0, 1, 0, 1, lane_bytes // tokens),)


@dataclass(frozen=True)
class LayerShape:
    """What the engine knows of a layer's cache.

    Attributes:
        group: KV cache group.
        tokens: tokens per block of the block table.
        heads: KV heads on this rank.
        model_heads: KV heads of the layer over all ranks.
        window: tokens of its sliding window; 0 for none.
        heads_apart: whether what the cache's head dimension counts are these heads.
        packing: how tokens lie in a lane, given the tokens of a kernel block and the
            bytes of a lane; None where that is not known.
    """

    group: int = 0
    tokens: int = 0
    heads: int = 1
    model_heads: int = 1
    window: int = 0
    heads_apart: bool = True
    packing: Callable[[int, int], tuple[Plane, ...]] | None = None


def describe(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    num_blocks: int,
    shapes: Mapping[str, LayerShape],
) -> CacheLayout:
    """Describe registered cache tensors.

    Args:
        kv_caches: the tensor of each layer, its dimensions kernel blocks (one or more
            per block of the block table), heads, tokens and content.
        num_blocks: blocks that the block tables count.
        shapes: what is known of each layer; layers that are absent are not
            transferred.

    Raises:
        LayoutError: a layer's blocks are not contiguous pages.
    """
    regions: list[RegionInfo] = []
    seen: set[tuple[int, int]] = set()
    extents: list[MemoryRange] = []
    for layer, cache in kv_caches.items():
        if layer not in shapes:
            continue
        if not isinstance(cache, torch.Tensor):
            raise LayoutError(
                f"layer {layer!r} has {len(cache)} cache tensors; only attention "
                "layers with one tensor each can be transferred"
            )
        shape = shapes[layer]
        address = cache.data_ptr()
        if (shape.group, address) in seen:
            # Layers that share a cache move once; both sides list the same one. Layers
            # of different groups have the memory in common, but never its blocks.
            continue
        seen.add((shape.group, address))
        region = _region(layer, cache, num_blocks, shape)
        regions.append(region)
        extents.append(
            MemoryRange(
                address,
                region.stride * (num_blocks - 1) + region.page_bytes,
                region.device_id,
            )
        )
    if not regions:
        raise LayoutError("no layer has a KV cache to transfer")
    return CacheLayout(tuple(regions), _merge(extents))


def parts_of_regions(regions: Sequence[RegionInfo], parts: int) -> tuple[int, ...]:
    """Which of ``parts`` parts each region is in, counted from 0.

    Layers are divided in their order, as evenly as it goes; there are not more parts
    than layers.
    """
    layers = {layer: index for index, layer in enumerate(_distinct(regions))}
    parts = min(parts, len(layers))
    return tuple(layers[r.layer] * parts // len(layers) for r in regions)


def _distinct(regions: Sequence[RegionInfo]) -> dict[str, None]:
    return dict.fromkeys(region.layer for region in regions)


def _region(
    layer: str, cache: torch.Tensor, num_blocks: int, shape: LayerShape
) -> RegionInfo:
    kernel_blocks = cache.shape[0]
    if num_blocks < 1 or kernel_blocks % num_blocks:
        raise LayoutError(
            f"layer {layer!r} has {kernel_blocks} kernel blocks, no multiple of the "
            f"{num_blocks} blocks of the block table"
        )
    item = cache.element_size()
    stride = cache.stride(0) * item
    page = cache[0]
    page_bytes = page.numel() * item
    span = item * (
        1 + sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True))
    )
    if span != page_bytes:
        raise LayoutError(
            f"layer {layer!r} of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()} does not keep a block in one piece; use a KV cache "
            "layout with the block dimension before heads and tokens (LBHNC, LBNHC)"
        )
    ratio = kernel_blocks // num_blocks
    if ratio > 1 and stride != page_bytes:
        raise LayoutError(
            f"layer {layer!r} splits a block into {ratio} kernel blocks that are "
            f"{stride} bytes apart but {page_bytes} bytes long"
        )
    if shape.tokens % ratio:
        raise LayoutError(
            f"layer {layer!r} splits blocks of {shape.tokens} tokens into {ratio} "
            "kernel blocks"
        )
    lanes, planes = _inside(page, page_bytes, shape, shape.tokens // ratio)
    return RegionInfo(
        layer=layer,
        group=shape.group,
        address=cache.data_ptr(),
        page_bytes=page_bytes * ratio,
        stride=stride * ratio,
        num_blocks=num_blocks,
        device_id=max(cache.get_device(), 0),
        tokens=shape.tokens,
        heads=shape.heads,
        model_heads=shape.model_heads,
        lanes=lanes,
        kernel_blocks=ratio,
        planes=planes,
        window=shape.window,
    )


def _inside(
    page: torch.Tensor, page_bytes: int, shape: LayerShape, tokens: int
) -> tuple[int, tuple[Plane, ...]]:
    """The lanes of a kernel block, and the planes of each."""
    heads = page.shape[0] if page.dim() == 3 else 1
    inner = page.numel() // heads
    outside = heads > 1 and page.stride(0) == inner
    if outside and not (shape.heads_apart and heads == shape.heads):
        return 1, ()
    lanes = heads if outside else 1
    if shape.packing is None or not tokens:
        return lanes, ()
    return lanes, shape.packing(tokens, page_bytes // lanes)


def _merge(extents: Sequence[MemoryRange]) -> tuple[MemoryRange, ...]:
    merged: list[MemoryRange] = []
    for extent in sorted(extents, key=lambda e: (e.device_id, e.address)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.device_id == extent.device_id
            and extent.address <= last.address + last.length
        ):
            end = max(last.address + last.length, extent.address + extent.length)
            merged[-1] = MemoryRange(last.address, end - last.address, last.device_id)
        else:
            merged.append(extent)
    return tuple(merged)
