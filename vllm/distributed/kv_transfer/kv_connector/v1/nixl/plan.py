# SPDX-License-Identifier: Apache-2.0
"""From two block tables to the descriptor indices of NIXL transfers.

Blocks pair by their position in the prompt. Which rows the two prepared lists have is
told by :mod:`.pages`: index ``base + b`` names a row's piece of block ``b``; NIXL
merges neighbours that are adjacent on both sides.

Compiled code pairs the tables of equal block sizes, where it is built; numpy is the
reference, the fallback, and pairs the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .native import NATIVE, Native, Table
from .pages import GroupPages, Pages, Run, SidePages
from .wire.blocks import BlockArray
from .wire.notifications import Want


class PlanError(ValueError):
    """Block tables that cannot be paired."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of one group, in order of the local side.

    A pair is a block, or a unit of one, by its number in the rows of each side.
    """

    local: BlockArray
    remote: BlockArray
    pages: GroupPages
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
        return self.pairs.pages.unit_bytes * (self.stop - self.start)

    @property
    def local(self) -> BlockArray:
        """Indices into the local list. They are made at each access.

        A long hand-off has many pieces; made when a piece is posted, the indices stay
        few, and the first piece need not wait for those of the others.
        """
        pairs = self.pairs
        numbers = pairs.local[self.start : self.stop]
        return _expand(pairs.native, pairs.pages.local, numbers)

    @property
    def remote(self) -> BlockArray:
        """Indices into the remote list, as many; they are made at each access."""
        pairs = self.pairs
        numbers = pairs.remote[self.start : self.stop]
        return _expand(pairs.native, pairs.pages.remote, numbers)


def plan(
    pages: Pages,
    want: Want,
    local_blocks: Sequence[BlockArray],
    remote_blocks: Sequence[BlockArray],
    max_bytes: int,
    native: Native | None = NATIVE,
) -> list[Piece]:
    """Pair what two block tables have of the same tokens, for every group.

    Args:
        pages: what of a block is moved, and its rows in the lists.
        want: the tokens. The tables of each side begin with the block that holds the
            first of them, and end with the one that holds the last.
        local_blocks: block ids per group, by position.
        remote_blocks: the same of the other side.
        max_bytes: bound on one piece, except that a piece has one pair at least.
        native: the compiled code to use, or None for numpy.

    Raises:
        PlanError: tables that do not fit the tokens or each other, or ids that a side
            does not have.
    """
    needed = len(pages.groups)
    if len(local_blocks) != len(remote_blocks) or len(local_blocks) < needed:
        raise PlanError(
            f"block tables for {len(local_blocks)} local and {len(remote_blocks)} "
            f"remote groups, expected {needed}"
        )
    tables: list[_Units] = []
    for group, mine, theirs in zip(
        pages.groups, local_blocks, remote_blocks, strict=False
    ):
        if group is not None:
            _check_lengths(group, want, mine, theirs)
            tables.append(_in_units(group, mine, theirs, want))
    steps = [max(1, max_bytes // table.group.unit_bytes) for table in tables]
    if native is None or not all(table.group.is_plain for table in tables):
        for table in tables:
            _check_ids(0, table.group.local, table.local[0])
            _check_ids(1, table.group.remote, table.remote[0])
        paired = [_pair(*each) for each in zip(tables, steps, strict=True)]
    else:
        paired = _pair_natively(native, tables, steps)
    return [
        Piece(
            Pairs(mine, theirs, table.group, native),
            start,
            min(start + step, len(mine)),
            descriptors,
        )
        for table, step, (mine, theirs, counts) in zip(
            tables, steps, paired, strict=True
        )
        for start, descriptors in zip(range(0, len(mine), step), counts, strict=True)
    ]


# Numbers of the local and the remote side in order of the local ones, and the
# descriptors of each piece.
_Paired: TypeAlias = tuple[BlockArray, BlockArray, list[int]]


def _check_lengths(
    group: GroupPages, want: Want, mine: BlockArray, theirs: BlockArray
) -> None:
    if not group.unit:
        if len(mine) != len(theirs):
            raise PlanError(f"{len(mine)} local blocks for {len(theirs)} remote ones")
        return
    if want.first_token % group.unit:
        raise PlanError(
            f"tokens from {want.first_token} on are to be moved, expected a multiple "
            f"of the smaller block size {group.unit}"
        )
    for name, side, ids in (
        ("local", group.local, mine),
        ("remote", group.remote, theirs),
    ):
        expected = len(want.block_range(side.tokens))
        if len(ids) != expected:
            raise PlanError(
                f"{len(ids)} {name} blocks of {side.tokens} tokens for tokens "
                f"{want.first_token} to {want.end}, expected {expected}"
            )


def _check_ids(side: int, pages: SidePages, ids: BlockArray) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= pages.blocks):
        raise _out_of_range(side, int(ids.min()), int(ids.max()), pages.blocks)


@dataclass(frozen=True)
class _Units:
    """The pairs of a group: on each side the block, and which unit of it.

    There are no units where whole blocks are paired.
    """

    group: GroupPages
    local: tuple[BlockArray, BlockArray | None]
    remote: tuple[BlockArray, BlockArray | None]


def _in_units(
    group: GroupPages, mine: BlockArray, theirs: BlockArray, want: Want
) -> _Units:
    if group.is_plain and not group.window:
        return _Units(group, (mine, None), (theirs, None))
    units = want.block_range(group.unit)
    position = np.arange(units.start, units.stop, dtype=np.int32)
    sides: list[tuple[BlockArray, BlockArray]] = []
    for pages, ids in ((group.local, mine), (group.remote, theirs)):
        block, unit = np.divmod(position, np.int32(pages.units))
        first = want.first_token // pages.tokens
        sides.append((ids[block - first], unit))
    local, remote = sides
    if group.window:
        # A side that has let go of a block lists block 0 for it.
        there = (local[0] != 0) & (remote[0] != 0)
        half = (local[0] != 0) != (remote[0] != 0)
        needed = (position + 1) * group.unit > 1 + want.prompt_tokens - group.window
        if np.any(half & needed):
            lost = int(position[half & needed][0]) * group.unit
            raise PlanError(
                f"one side has no block for token {lost}, which the sliding window "
                f"of {group.window} tokens at the end of {want.prompt_tokens} needs"
            )
        local, remote = ((ids[there], unit[there]) for ids, unit in (local, remote))
    return _Units(group, local, remote)


def _pair(units: _Units, step: int) -> _Paired:
    group = units.group
    # Tables taken from a free list often run downwards; sorted by one side, they run
    # upwards on both and merge.
    sides = [
        (ids, np.zeros_like(ids) if unit is None else unit)
        for ids, unit in (units.local, units.remote)
    ]
    ids, unit = sides[0]
    order = np.argsort(ids.astype(np.int64) * group.local.units + unit, kind="stable")
    local, remote = ((ids[order], unit[order]) for ids, unit in sides)
    counts = np.zeros(-(-len(order) // step), dtype=np.int64)
    for run, rows in group.runs.items():
        breaks = ~(_follows(run, 0, local) & _follows(run, 1, remote))
        counts += rows * np.array(
            [
                1 + int(np.count_nonzero(breaks[start : start + step - 1]))
                for start in range(0, len(order), step)
            ],
            dtype=np.int64,
        )
    return (
        group.local.numbers(*local),
        group.remote.numbers(*remote),
        counts.tolist(),
    )


def _follows(
    run: Run, side: int, pairs: tuple[BlockArray, BlockArray]
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each pair's piece begins where that of the pair before it ends."""
    ids, units = pairs
    starts = np.array(run.units[side], dtype=np.int64)[units]
    starts = starts + ids.astype(np.int64) * run.strides[side]
    found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (
        np.diff(starts) == run.length
    )
    return found


def _pair_natively(
    native: Native, tables: Sequence[_Units], steps: Sequence[int]
) -> list[_Paired]:
    if not tables:
        return []
    given: list[Table] = []
    for table, step in zip(tables, steps, strict=True):
        mine, theirs = table.local[0], table.remote[0]
        blocks = len(mine)
        given.append(
            (
                np.ascontiguousarray(mine),
                np.ascontiguousarray(theirs),
                min(step, max(1, blocks)),
                np.empty(blocks, dtype=np.int32),
                np.empty(blocks, dtype=np.int32),
                np.empty(-(-blocks // step), dtype=np.int32),
            )
        )
    # All caches of a rank have the same number of blocks.
    counts = tables[0].group.local.blocks, tables[0].group.remote.blocks
    wrong = native.compiled.pair_tables(given, *counts, native.pairs)
    if wrong is not None:
        _, is_remote, lowest, highest = wrong
        raise _out_of_range(int(is_remote), lowest, highest, counts[is_remote])
    return [
        (mine, theirs, _descriptors(table.group, step, len(mine), runs))
        for table, step, (_, _, _, mine, theirs, runs) in zip(
            tables, steps, given, strict=True
        )
    ]


def _descriptors(
    group: GroupPages, step: int, blocks: int, runs: BlockArray
) -> list[int]:
    """Per piece, from the runs of block ids that go up on both sides."""
    counts: list[int] = runs.tolist()
    dense, loose = group.dense_rows
    if not loose:
        return [count * dense for count in counts]
    return [
        count * dense + min(step, blocks - index * step) * loose
        for index, count in enumerate(counts)
    ]


def _out_of_range(side: int, lowest: int, highest: int, count: int) -> PlanError:
    return PlanError(
        f"{('local', 'remote')[side]} block ids reach from {lowest} to {highest}, "
        f"that side has {count} blocks"
    )


def _expand(native: Native | None, pages: SidePages, numbers: BlockArray) -> BlockArray:
    if native is None:
        return (pages.bases[:, None] + numbers).reshape(-1)
    indices = np.empty(len(numbers) * len(pages.bases), dtype=np.int32)
    native.compiled.expand(numbers, pages.bases, 1, indices, native.indices)
    return indices
