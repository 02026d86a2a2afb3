# SPDX-License-Identifier: Apache-2.0
"""Which bytes of two pages are the same: the pages of one layer on two ranks.

What two ranks share of a layer is some heads of some tokens. Tokens are counted in
*units*, the block size of the side that has the smaller one: a page of the other side
has ``k`` of them. For each unit the same number of pieces moves, each of them
contiguous on both sides.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .wire.ranks import Plane, RegionInfo

MAX_PIECES = 1 << 16
"""Pieces of one page. A description that needs more is not believed."""

MAX_BYTES = 2**60
"""Addresses and lengths that are believed; sums of some are below 2**63."""

HEADS_OUTSIDE = (
    "Heads must lie outside tokens for that: choose VLLM_KV_CACHE_LAYOUT=LBHNC (HND) "
    "on both sides."
)

Offsets: TypeAlias = npt.NDArray[np.int64]


class PairingError(ValueError):
    """Pages of which it cannot be said which bytes are the same."""


@dataclass(frozen=True)
class Pieces:
    """What of two pages is the same.

    Attributes:
        unit: tokens per unit; 0 where a page is moved whole.
        local: the offset in the page per unit of a local page, and piece.
        remote: the same of the other side.
        lengths: bytes per piece.
    """

    unit: int
    local: Offsets
    remote: Offsets
    lengths: Offsets


@dataclass(frozen=True)
class _Shape:
    """The inside of a page, and which of its heads are meant."""

    page_bytes: int
    tokens: int
    kernel_blocks: int
    lanes: int
    planes: tuple[Plane, ...]
    heads: int
    first_head: int

    @property
    def kernel_tokens(self) -> int:
        return self.tokens // self.kernel_blocks

    @property
    def kernel_bytes(self) -> int:
        return self.page_bytes // self.kernel_blocks

    @property
    def lane_bytes(self) -> int:
        return self.kernel_bytes // self.lanes


def shared_pieces(
    local: RegionInfo, remote: RegionInfo, heads: tuple[int, int, int]
) -> Pieces:
    """The pieces of a layer's pages that two ranks share.

    Args:
        local: this rank's pages.
        remote: the other rank's.
        heads: the first one by its place in the local page, by its place in the
            remote one, and how many.

    Raises:
        PairingError: the layouts do not allow it.
    """
    mine, theirs, count = heads
    for region, first in ((local, mine), (remote, theirs)):
        _check(region, first, count)
    try:
        return _pieces(_shape(local, mine), _shape(remote, theirs), count)
    except PairingError as error:
        raise PairingError(f"layer {local.layer}: {error}") from error


def _shape(region: RegionInfo, first_head: int) -> _Shape:
    return _Shape(
        region.page_bytes,
        region.tokens,
        region.kernel_blocks,
        region.lanes,
        region.planes,
        region.heads,
        first_head,
    )


def _check(region: RegionInfo, first: int, count: int) -> None:
    """That a description is of something that can be."""
    lanes = region.kernel_blocks * region.lanes
    problem = ""
    if not all(0 <= n <= MAX_BYTES for n in (region.address, region.stride)):
        problem = f"pages {region.stride} bytes apart from {region.address} on"
    elif (
        not 0 < region.page_bytes <= MAX_BYTES
        or lanes < 1
        or (region.page_bytes % lanes)
    ):
        problem = f"{region.page_bytes} bytes in {lanes} lanes"
    elif region.tokens % region.kernel_blocks:
        problem = f"{region.tokens} tokens in {region.kernel_blocks} kernel blocks"
    elif region.lanes not in (1, region.heads):
        problem = f"{region.heads} heads in {region.lanes} lanes"
    elif not 0 <= first < first + count <= region.heads:
        problem = f"heads {first} to {first + count} of {region.heads}"
    elif region.planes:
        problem = _check_planes(region)
    if problem:
        raise PairingError(f"layer {region.layer} has {problem}, which cannot be")


def _check_planes(region: RegionInfo) -> str:
    tokens = region.tokens // region.kernel_blocks
    lane = region.page_bytes // (region.kernel_blocks * region.lanes)
    told = 0
    for plane in region.planes:
        if plane.granule < 1 or tokens < 1 or tokens % plane.granule:
            return f"granules of {plane.granule} tokens in {tokens}"
        span = tokens // plane.granule * plane.granule_bytes
        told += plane.rows * span
        end = plane.offset + (plane.rows - 1) * plane.row_stride + span
        if plane.rows < 1 or plane.granule_bytes < 1 or end > lane:
            return f"a plane that ends at {end} of {lane} bytes"
    return "" if told == lane else f"planes of {told} bytes in {lane}"


@lru_cache(maxsize=64)
def _pieces(local: _Shape, remote: _Shape, count: int) -> Pieces:
    if local.tokens == remote.tokens and local.kernel_blocks == remote.kernel_blocks:
        return _whole_tokens(local, remote, count)
    return _parts_of_tokens(local, remote, count)


def _whole_tokens(local: _Shape, remote: _Shape, count: int) -> Pieces:
    """All tokens of both pages; of the heads perhaps some."""
    whole = count == local.heads == remote.heads
    if not whole:
        _require_lanes(local, remote, count)
    if local.planes != remote.planes:
        raise PairingError("tokens lie differently in the pages of the two sides")
    if whole:
        if local.page_bytes != remote.page_bytes or local.lanes != remote.lanes:
            raise PairingError(
                f"page_bytes differs (local {local.page_bytes}, remote "
                f"{remote.page_bytes})"
            )
        start = np.zeros((1, 1), dtype=np.int64)
        return Pieces(0, start, start, np.array([local.page_bytes], dtype=np.int64))
    if local.lane_bytes != remote.lane_bytes:
        raise PairingError(
            f"bytes of a head differ (local {local.lane_bytes}, remote "
            f"{remote.lane_bytes})"
        )
    starts = np.arange(local.kernel_blocks, dtype=np.int64)
    return _joined(
        0,
        (starts * local.kernel_bytes + local.first_head * local.lane_bytes)[None],
        (starts * remote.kernel_bytes + remote.first_head * remote.lane_bytes)[None],
        np.full(len(starts), count * local.lane_bytes, dtype=np.int64),
    )


def _parts_of_tokens(local: _Shape, remote: _Shape, count: int) -> Pieces:
    """Pages of different sizes, or divided differently into kernel blocks."""
    unit = min(local.tokens, remote.tokens)
    if not unit or max(local.tokens, remote.tokens) % unit:
        raise PairingError(
            f"block sizes {local.tokens} (local) and {remote.tokens} (remote): one "
            "must be a multiple of the other"
        )
    if not local.planes or not remote.planes:
        raise PairingError(
            f"block sizes {local.tokens} (local) and {remote.tokens} (remote) differ "
            "in themselves or in kernel blocks, and this layout does not let the "
            "tokens of a page be told apart; choose the same block size on both sides"
        )
    if count == local.heads == remote.heads and local.lanes == remote.lanes:
        lanes = range(local.lanes)
    else:
        _require_lanes(local, remote, count)
        lanes = range(count)
    step = gcd(unit, local.kernel_tokens, remote.kernel_tokens)
    if any(s.kernel_tokens % unit and unit % s.kernel_tokens for s in (local, remote)):
        raise PairingError(
            f"kernel blocks of {local.kernel_tokens} (local) and "
            f"{remote.kernel_tokens} (remote) tokens do not fit into {unit}"
        )
    sides = [_offsets(side, lanes, unit, step) for side in (local, remote)]
    (here, lengths), (there, others) = sides
    orders = [[(p.granule, p.order) for p in s.planes] for s in (local, remote)]
    if orders[0] != orders[1] or not np.array_equal(lengths, others):
        raise PairingError("tokens lie differently in the pages of the two sides")
    return _joined(unit, here, there, lengths)


def _require_lanes(local: _Shape, remote: _Shape, count: int) -> None:
    for side, shape in (("local", local), ("remote", remote)):
        if shape.lanes != shape.heads:
            raise PairingError(
                f"the {side} side keeps {shape.heads} heads of a page in one piece, of "
                f"which {count} are to be moved. {HEADS_OUTSIDE}"
            )


def _offsets(
    shape: _Shape, lanes: range, unit: int, step: int
) -> tuple[Offsets, Offsets]:
    """Per unit of a page, where its steps of tokens begin, and how long they are."""
    units, steps = shape.tokens // unit, unit // step
    rows = sum(plane.rows for plane in shape.planes)
    if units * len(lanes) * rows * steps > MAX_PIECES:
        raise PairingError(f"a page would be moved in more than {MAX_PIECES} pieces")
    token = (
        np.arange(units, dtype=np.int64)[:, None] * unit
        + np.arange(steps, dtype=np.int64)[None] * step
    )
    kernel, within = np.divmod(token, shape.kernel_tokens)
    found: list[Offsets] = []
    lengths: list[Offsets] = []
    for lane in lanes:
        first = lane + (shape.first_head if shape.lanes == shape.heads else 0)
        for plane in shape.planes:
            if step % plane.granule:
                raise PairingError(
                    f"pages hold tokens packed by {plane.granule}, of which {step} "
                    "cannot be told apart; choose block sizes that are multiples of "
                    f"{plane.granule}"
                )
            start = kernel * shape.kernel_bytes + first * shape.lane_bytes
            start += plane.offset + within // plane.granule * plane.granule_bytes
            size = step // plane.granule * plane.granule_bytes
            for row in range(plane.rows):
                found.append(start + row * plane.row_stride)
                lengths.append(np.full(steps, size, dtype=np.int64))
    return np.concatenate(found, axis=1), np.concatenate(lengths)


def _joined(unit: int, local: Offsets, remote: Offsets, lengths: Offsets) -> Pieces:
    """Join pieces that follow each other on both sides."""
    follows = np.ones(len(lengths) - 1, dtype=bool)
    for side in (local, remote):
        follows &= (side[:, :-1] + lengths[:-1] == side[:, 1:]).all(axis=0)
    starts = np.concatenate(([0], 1 + np.flatnonzero(~follows)))
    return Pieces(
        unit, local[:, starts], remote[:, starts], np.add.reduceat(lengths, starts)
    )
