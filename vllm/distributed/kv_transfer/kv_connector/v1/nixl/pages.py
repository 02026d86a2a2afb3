# SPDX-License-Identifier: Apache-2.0
"""The prepared descriptor lists of a pair of ranks: which rows, in which order.

Both lists have a row for each piece that two pages share (:mod:`.pairing`), and where a
page has several units, one for each of them: ``count`` descriptors, one per block. So
the index of a piece of block ``b`` is the row's first index plus ``b``. Where the units
of all pages follow each other at the same distance, one row names the units instead.

Rows that follow each other on both sides are one row: all layers of a block, where it
holds them side by side.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from .layout import Row, parts_of_regions
from .pairing import PairingError, Pieces, shared_pieces
from .serving import shape_of
from .topology import heads_of, slices
from .wire.blocks import BlockArray
from .wire.ranks import RankInfo, RegionInfo

INDEX_LIMIT = 2**31
"""NIXL takes indices as int32."""

Addresses: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Rows that are alike: when do descriptors of neighbouring blocks join?

    If what follows a descriptor on both sides is the next one. ``strides`` and
    ``units`` are of the local and the remote side: bytes between blocks, and where the
    units of a block begin.
    """

    length: int
    strides: tuple[int, int]
    units: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def is_dense(self) -> bool:
        """Whether it joins exactly where both block ids go up by one."""
        return self.strides == (self.length, self.length)


@dataclass(frozen=True)
class SidePages:
    """One side of a group.

    Attributes:
        blocks: how many there are.
        tokens: tokens per block; 0 where it has not been told.
        units: units per block.
        flat: whether units are numbered through, instead of block by block for each.
        bases: the first index of each piece.
    """

    blocks: int
    tokens: int
    units: int
    flat: bool
    bases: BlockArray

    def numbers(self, ids: BlockArray, units: BlockArray) -> BlockArray:
        """What is to be added to ``bases`` for units of blocks."""
        if self.units == 1:
            return ids
        found = ids * self.units + units if self.flat else units * self.blocks + ids
        return found.astype(np.int32, copy=False)


@dataclass(frozen=True)
class GroupPages:
    """What is moved of a KV cache group.

    ``unit_bytes`` are moved of each unit of ``unit`` tokens. ``runs`` counts rows that
    are alike. ``window`` is as for :class:`~.wire.ranks.RegionInfo`.
    """

    local: SidePages
    remote: SidePages
    unit: int
    unit_bytes: int
    window: int
    runs: Mapping[Run, int]

    @property
    def is_plain(self) -> bool:
        """Whether whole blocks are paired."""
        return self.local.units == self.remote.units == 1

    @cached_property
    def dense_rows(self) -> tuple[int, int]:
        """Rows of which neighbouring blocks join, and others."""
        dense = sum(rows for run, rows in self.runs.items() if run.is_dense)
        return dense, sum(self.runs.values()) - dense


@dataclass(frozen=True)
class Pages:
    """What a pair of ranks moves: per KV cache group, nothing or something."""

    groups: tuple[GroupPages | None, ...]


@dataclass(frozen=True)
class Lists:
    """The rows of both lists, and what is in them, per part of the layers."""

    local: tuple[Row, ...]
    remote: tuple[Row, ...]
    parts: tuple[Pages, ...]


@dataclass
class _Piece:
    """A piece of the pages of one layer, or of several that lie side by side."""

    local: Addresses
    remote: Addresses
    length: int
    strides: tuple[int, int]
    devices: tuple[int, int]

    def takes(self, other: "_Piece") -> bool:
        """Join ``other`` to this one, if it follows on both sides."""
        if (self.strides, self.devices) != (other.strides, other.devices):
            return False
        for mine, theirs in ((self.local, other.local), (self.remote, other.remote)):
            if not np.array_equal(mine + self.length, theirs):
                return False
        self.length += other.length
        return True

    def side(self, index: int) -> Addresses:
        return self.remote if index else self.local


@dataclass
class _Group:
    shared: "Shared"
    units: tuple[int, int]
    pieces: list[_Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Shared:
    """A layer that two ranks share.

    ``heads`` are the first one by its place in the local page, by its place in the
    remote one, and how many. ``part`` is the part of the layers that it is in.
    """

    local: RegionInfo
    remote: RegionInfo
    heads: tuple[int, int, int]
    part: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens per block on both sides."""
        return self.local.tokens, self.remote.tokens


def pair_ranks(
    local: RankInfo, remote: RankInfo, local_gives: bool, parts: int = 1
) -> Lists:
    """What moves between two ranks, and the lists that name it.

    Args:
        local: this rank.
        remote: the other one.
        local_gives: whether KV goes from here to there.
        parts: into how many parts the local layers are divided.

    Raises:
        TopologyError: heads cannot be divided over the ranks.
        PairingError: the layouts do not allow it.
    """
    theirs = {region.layer: region for region in remote.regions}
    part_of = parts_of_regions(local.regions, parts)
    found: list[Shared] = []
    for region, part in zip(local.regions, part_of, strict=True):
        other = theirs.get(region.layer)
        if other is None:
            continue
        here, there = _told(region, local), _told(other, remote)
        heads = _heads((local, here), (remote, there), local_gives)
        if heads is not None:
            found.append(Shared(here, there, heads, part))
    return pair_regions(found, 1 + max(part_of))


def pair_regions(shared: Iterable[Shared], parts: int = 1) -> Lists:
    """See :func:`pair_ranks`, where it is known what of each layer is shared.

    Raises:
        PairingError: the layouts do not allow it.
    """
    found: list[dict[int, _Group]] = [{} for _ in range(parts)]
    for layer in shared:
        pieces = shared_pieces(layer.local, layer.remote, layer.heads)
        _add(found[layer.part], layer, pieces)
    rows: tuple[list[Row], list[Row]] = ([], [])
    ends = [0, 0]
    made: list[Pages] = []
    for groups in found:
        count = 1 + max(groups, default=-1)
        made.append(
            Pages(
                tuple(
                    _lay_out(groups[g], rows, ends) if g in groups else None
                    for g in range(count)
                )
            )
        )
    if max(ends) > INDEX_LIMIT:
        raise PairingError(
            f"a descriptor list of {max(ends)} pieces of pages is longer than an index "
            f"can tell, {INDEX_LIMIT}; choose equal block sizes, or fewer blocks"
        )
    return Lists(tuple(rows[0]), tuple(rows[1]), tuple(made))


def _told(region: RegionInfo, info: RankInfo) -> RegionInfo:
    """The region, with its tokens per page where it does not tell."""
    if region.tokens:
        return region
    return msgspec.structs.replace(region, tokens=info.block_size)


def _heads(
    here: tuple[RankInfo, RegionInfo], there: tuple[RankInfo, RegionInfo], gives: bool
) -> tuple[int, int, int] | None:
    """The heads that go from one side to the other, if any."""
    heads = here[1].model_heads
    if heads != there[1].model_heads:
        raise PairingError(
            f"KV heads of layer {here[1].layer} differ (local {heads}, remote "
            f"{there[1].model_heads})"
        )
    for info, region in (here, there):
        held = len(heads_of(info.tp_rank, info.tp_size, region.model_heads))
        if region.heads != held:
            raise PairingError(
                f"layer {region.layer} has {region.heads} of {region.model_heads} KV "
                f"heads on a rank of {info.tp_size}, expected {held}"
            )
    giver, taker = (here[0], there[0]) if gives else (there[0], here[0])
    found = slices(shape_of(taker), giver.tp_size, heads).get(giver.tp_rank)
    if found is None:
        return None
    mine, theirs = (
        found.start - heads_of(info.tp_rank, info.tp_size, heads).start
        for info in (here[0], there[0])
    )
    return mine, theirs, len(found)


def _add(groups: dict[int, _Group], layer: Shared, pieces: Pieces) -> None:
    local, remote = layer.local, layer.remote
    if (local.group, local.window) != (remote.group, remote.window):
        raise PairingError(
            f"cache group of {local.layer} differs (local {local.group} with window "
            f"{local.window}, remote {remote.group} with window {remote.window})"
        )
    units = pieces.local.shape[0], pieces.remote.shape[0]
    group = groups.setdefault(local.group, _Group(layer, units))
    if group.shared.tokens != layer.tokens or group.units != units:
        raise PairingError(
            f"layers {group.shared.local.layer} and {local.layer} of one cache group "
            f"have blocks of {group.shared.tokens} and {layer.tokens} tokens"
        )
    if (group.shared.local.num_blocks, group.shared.remote.num_blocks) != (
        local.num_blocks,
        remote.num_blocks,
    ):
        raise PairingError(f"layer {local.layer} has another number of blocks")
    for index, length in enumerate(pieces.lengths):
        piece = _Piece(
            local.address + pieces.local[:, index],
            remote.address + pieces.remote[:, index],
            int(length),
            (local.stride, remote.stride),
            (local.device_id, remote.device_id),
        )
        if not group.pieces or not group.pieces[-1].takes(piece):
            group.pieces.append(piece)


def _lay_out(
    group: _Group, rows: tuple[list[Row], list[Row]], ends: list[int]
) -> GroupPages:
    """Append a group's rows to both lists, which have ``ends`` descriptors so far."""
    regions = group.shared.local, group.shared.remote
    sides: list[SidePages] = []
    for side, region in enumerate(regions):
        units, blocks = group.units[side], region.num_blocks
        flat = units > 1 and all(_is_flat(p, side, units) for p in group.pieces)
        bases = []
        for piece in group.pieces:
            bases.append(ends[side])
            ends[side] += units * blocks
            rows[side].extend(_rows(piece, side, blocks, flat))
        sides.append(
            SidePages(
                blocks, region.tokens, units, flat, np.array(bases).astype(np.int32)
            )
        )
    return GroupPages(
        sides[0],
        sides[1],
        min(group.shared.tokens),
        sum(piece.length for piece in group.pieces),
        group.shared.local.window,
        Counter(_run(piece) for piece in group.pieces),
    )


def _is_flat(piece: _Piece, side: int, units: int) -> bool:
    stride = piece.strides[side]
    return stride % units == 0 and bool(
        (np.diff(piece.side(side)) == stride // units).all()
    )


def _rows(piece: _Piece, side: int, blocks: int, flat: bool) -> list[Row]:
    starts, stride = piece.side(side), piece.strides[side]
    device = piece.devices[side]
    if flat:
        units = len(starts)
        return [
            Row(int(starts[0]), piece.length, device, stride // units, blocks * units)
        ]
    return [Row(int(start), piece.length, device, stride, blocks) for start in starts]


def _run(piece: _Piece) -> Run:
    return Run(
        piece.length,
        piece.strides,
        (
            tuple(int(a) for a in piece.local - piece.local[0]),
            tuple(int(a) for a in piece.remote - piece.remote[0]),
        ),
    )
