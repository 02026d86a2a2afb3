# SPDX-License-Identifier: Apache-2.0
"""From two block tables to the descriptor indices of NIXL transfers.

Blocks pair by their position in the prompt. A prepared descriptor list holds the
pages of all regions, region by region, so page ``b`` of region ``r`` has the index
``r * num_blocks + b``; NIXL merges neighbours that are adjacent on both sides.

Compiled code does this where it is built; numpy is the reference and the fallback.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from .native import NATIVE, Native, Table
from .wire import BlockArray, RegionInfo

INDEX_LIMIT = 2**31
"""NIXL takes indices as int32."""


class PlanError(ValueError):
    """Block tables that cannot be paired."""


@dataclass(frozen=True)
class Pages:
    """The shape of a rank's prepared list: pages per region, regions per group."""

    num_blocks: int
    regions_of_group: tuple[tuple[int, ...], ...]
    page_bytes: tuple[int, ...]

    @classmethod
    def of(cls, regions: Sequence[RegionInfo]) -> "Pages":
        """Describe ``regions`` in their order."""
        groups = max(region.group for region in regions) + 1
        return cls(
            num_blocks=regions[0].num_blocks,
            regions_of_group=tuple(
                tuple(i for i, r in enumerate(regions) if r.group == group)
                for group in range(groups)
            ),
            page_bytes=tuple(region.page_bytes for region in regions),
        )

    def only(self, regions: Collection[int]) -> "Pages":
        """The same list, of which only these regions are to be moved."""
        return replace(
            self,
            regions_of_group=tuple(
                tuple(i for i in group if i in regions)
                for group in self.regions_of_group
            ),
        )

    @cached_property
    def groups(self) -> tuple[tuple[BlockArray, int], ...]:
        """Per group, its regions, and the bytes of one block in all of them."""
        return tuple(
            (
                np.asarray(regions, dtype=np.int32),
                sum(self.page_bytes[r] for r in regions),
            )
            for regions in self.regions_of_group
        )


@dataclass(frozen=True)
class Pairs:
    """The block pairs of one group, in order of the local block."""

    local: BlockArray
    remote: BlockArray
    regions: BlockArray
    local_count: int
    remote_count: int
    block_bytes: int
    native: Native | None


@dataclass(frozen=True)
class Piece:
    """One NIXL transfer: the pairs of one group from ``start`` to before ``stop``.

    ``descriptors`` is the number of descriptors left after merging.
    """

    pairs: Pairs
    start: int
    stop: int
    descriptors: int

    @property
    def bytes(self) -> int:
        """Bytes that are moved."""
        return self.pairs.block_bytes * (self.stop - self.start)

    @property
    def local(self) -> BlockArray:
        """Indices into the local list. They are made at each access.

        A long hand-off has many pieces; made when a piece is posted, the indices stay
        few, and the first piece need not wait for those of the others.
        """
        pairs = self.pairs
        return _expand(pairs, pairs.local[self.start : self.stop], pairs.local_count)

    @property
    def remote(self) -> BlockArray:
        """Indices into the remote list, as many; they are made at each access."""
        pairs = self.pairs
        return _expand(pairs, pairs.remote[self.start : self.stop], pairs.remote_count)


def plan(
    pages: Pages,
    remote_blocks_count: int,
    local_blocks: Sequence[BlockArray],
    remote_blocks: Sequence[BlockArray],
    max_bytes: int,
    native: Native | None = NATIVE,
) -> list[Piece]:
    """Pair ``local_blocks[g][i]`` with ``remote_blocks[g][i]`` for every group.

    Args:
        pages: the local list; the remote one has the same regions in that order.
        remote_blocks_count: pages per region of the remote list.
        local_blocks: block ids per group, by position.
        remote_blocks: the same of the other side.
        max_bytes: bound on one piece, except that a piece has one block at least.
        native: the compiled code to use, or None for numpy.

    Raises:
        PlanError: tables of unequal length, ids that a side does not have, or more
            pages than an index can name.
    """
    groups = pages.groups
    if len(local_blocks) != len(groups) or len(remote_blocks) != len(groups):
        raise PlanError(
            f"block tables for {len(local_blocks)} local and {len(remote_blocks)} "
            f"remote groups, expected {len(groups)}"
        )
    for mine, theirs in zip(local_blocks, remote_blocks, strict=True):
        if len(mine) != len(theirs):
            raise PlanError(f"{len(mine)} local blocks for {len(theirs)} remote ones")
    pages_count = max(pages.num_blocks, remote_blocks_count)
    if len(pages.page_bytes) * pages_count > INDEX_LIMIT:
        raise PlanError(
            f"{len(pages.page_bytes)} regions of {pages_count} blocks have more pages "
            f"than a descriptor list can name, {INDEX_LIMIT}"
        )
    counts = pages.num_blocks, remote_blocks_count
    steps = [max(1, max_bytes // max(1, block_bytes)) for _, block_bytes in groups]
    if native is None:
        paired = _pair_by_numpy(local_blocks, remote_blocks, counts, steps)
    else:
        paired = _pair_natively(native, local_blocks, remote_blocks, counts, steps)
    pieces: list[Piece] = []
    for (regions, block_bytes), step, (mine, theirs, runs) in zip(
        groups, steps, paired, strict=True
    ):
        if not len(regions):
            continue
        pairs = Pairs(mine, theirs, regions, *counts, block_bytes, native)
        pieces += [
            Piece(pairs, start, min(start + step, len(mine)), count * len(regions))
            for start, count in zip(range(0, len(mine), step), runs, strict=True)
            if len(regions)
        ]
    return pieces


# Local and remote ids in order of the local ones, and the runs of each piece.
_Paired: TypeAlias = tuple[BlockArray, BlockArray, list[int]]


def _pair_by_numpy(
    local_blocks: Sequence[BlockArray],
    remote_blocks: Sequence[BlockArray],
    counts: tuple[int, int],
    steps: Sequence[int],
) -> list[_Paired]:
    for tables in zip(local_blocks, remote_blocks, strict=True):
        for side, (ids, count) in enumerate(zip(tables, counts, strict=True)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
                raise _out_of_range(side, int(ids.min()), int(ids.max()), count)
    paired: list[_Paired] = []
    for mine, theirs, step in zip(local_blocks, remote_blocks, steps, strict=True):
        # Tables taken from a free list often run downwards; sorted by one side,
        # they run upwards on both and merge.
        order = np.argsort(mine, kind="stable")
        mine, theirs = mine[order], theirs[order]
        breaks = (np.diff(mine) != 1) | (np.diff(theirs) != 1)
        runs = [
            1 + int(np.count_nonzero(breaks[start : start + step - 1]))
            for start in range(0, len(mine), step)
        ]
        paired.append((mine, theirs, runs))
    return paired


def _pair_natively(
    native: Native,
    local_blocks: Sequence[BlockArray],
    remote_blocks: Sequence[BlockArray],
    counts: tuple[int, int],
    steps: Sequence[int],
) -> list[_Paired]:
    tables: list[Table] = []
    for mine, theirs, step in zip(local_blocks, remote_blocks, steps, strict=True):
        blocks = len(mine)
        tables.append(
            (
                np.ascontiguousarray(mine),
                np.ascontiguousarray(theirs),
                min(step, max(1, blocks)),
                np.empty(blocks, dtype=np.int32),
                np.empty(blocks, dtype=np.int32),
                np.empty(-(-blocks // step), dtype=np.int32),
            )
        )
    wrong = native.compiled.pair_tables(tables, *counts, native.pairs)
    if wrong is not None:
        _, is_remote, lowest, highest = wrong
        raise _out_of_range(int(is_remote), lowest, highest, counts[is_remote])
    return [(mine, theirs, runs.tolist()) for _, _, _, mine, theirs, runs in tables]


def _out_of_range(side: int, lowest: int, highest: int, count: int) -> PlanError:
    return PlanError(
        f"{('local', 'remote')[side]} block ids reach from {lowest} to {highest}, "
        f"that side has {count} blocks"
    )


def _expand(pairs: Pairs, ids: BlockArray, count: int) -> BlockArray:
    if pairs.native is None:
        return (pairs.regions[:, None] * count + ids).reshape(-1)
    indices = np.empty(len(ids) * len(pairs.regions), dtype=np.int32)
    pairs.native.compiled.expand(
        ids, pairs.regions, count, indices, pairs.native.indices
    )
    return indices
