# SPDX-License-Identifier: Apache-2.0
"""From two block tables to the descriptor indices of NIXL transfers.

Blocks pair by their position in the prompt. A prepared descriptor list holds the
pages of all regions, region by region, so page ``b`` of region ``r`` has the index
``r * num_blocks + b``; NIXL merges neighbours that are adjacent on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .wire import BlockArray, RegionInfo


class PlanError(ValueError):
    """Block tables that cannot be paired."""


@dataclass(frozen=True)
class Piece:
    """One NIXL transfer: index arrays of equal length into both lists.

    ``descriptors`` is the number of descriptors left after merging.
    """

    local: BlockArray
    remote: BlockArray
    bytes: int
    descriptors: int


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


def plan(
    pages: Pages,
    remote_blocks_count: int,
    local_blocks: Sequence[BlockArray],
    remote_blocks: Sequence[BlockArray],
    max_bytes: int,
) -> list[Piece]:
    """Pair ``local_blocks[g][i]`` with ``remote_blocks[g][i]`` for every group.

    Args:
        pages: the local list; the remote one has the same regions in that order.
        remote_blocks_count: pages per region of the remote list.
        local_blocks: block ids per group, by position.
        remote_blocks: the same of the other side.
        max_bytes: bound on one piece, except that a piece has one block at least.

    Raises:
        PlanError: tables of unequal length, or ids that a side does not have.
    """
    pieces: list[Piece] = []
    if len(local_blocks) != len(pages.regions_of_group) or len(remote_blocks) != len(
        pages.regions_of_group
    ):
        raise PlanError(
            f"block tables for {len(local_blocks)} local and {len(remote_blocks)} "
            f"remote groups, expected {len(pages.regions_of_group)}"
        )
    for regions, mine, theirs in zip(
        pages.regions_of_group, local_blocks, remote_blocks, strict=True
    ):
        if len(mine) != len(theirs):
            raise PlanError(f"{len(mine)} local blocks for {len(theirs)} remote ones")
        _check_range("local", mine, pages.num_blocks)
        _check_range("remote", theirs, remote_blocks_count)
        # Tables taken from a free list often run downwards; sorted by one side,
        # they run upwards on both and merge.
        order = np.argsort(mine, kind="stable")
        mine, theirs = mine[order], theirs[order]
        group_bytes = sum(pages.page_bytes[r] for r in regions)
        step = max(1, max_bytes // max(1, group_bytes))
        bases = np.asarray(regions, dtype=np.int32)[:, None]
        for start in range(0, len(mine), step):
            here, there = mine[start : start + step], theirs[start : start + step]
            pieces.append(
                Piece(
                    local=(bases * pages.num_blocks + here).reshape(-1),
                    remote=(bases * remote_blocks_count + there).reshape(-1),
                    bytes=group_bytes * len(here),
                    descriptors=_runs(here, there) * len(regions),
                )
            )
    return pieces


def _runs(mine: BlockArray, theirs: BlockArray) -> int:
    breaks = (np.diff(mine) != 1) | (np.diff(theirs) != 1)
    return 1 + int(np.count_nonzero(breaks))


def _check_range(side: str, blocks: BlockArray, count: int) -> None:
    if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= count):
        raise PlanError(
            f"{side} block ids reach from {int(blocks.min())} to {int(blocks.max())}, "
            f"that side has {count} blocks"
        )
