# SPDX-License-Identifier: Apache-2.0
"""A copy of the caches on the host, from which and into which KV moves.

It has a page for each page of the caches, so that a block has the same number in both,
and a page of it belongs to whoever holds the block. That costs as much memory on the
host as the caches have, and in return nothing has to be found room for, and nothing
can be given away while a peer reads or writes it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from .layout import parts_of_regions
from .orders import Fence
from .wire.blocks import BlockArray
from .wire.ranks import RegionInfo

CopyOperation: TypeAlias = Callable[
    [
        dict[str, torch.Tensor],
        dict[str, torch.Tensor],
        list[int],
        list[int],
        Literal["h2d", "d2h"],
    ],
    None,
]
"""The engine's own: source, destination, their blocks, and the direction."""

PIECE_BYTES = 8 << 20
"""Copied by one call, which nothing interrupts."""


class _Piece(NamedTuple):
    layer: str
    blocks: list[int]


class BlockCopy:
    """A copy of some blocks, which goes on while it is asked for.

    Args:
        pieces: what is copied, in turn.
        copy: copies one of them; it may return before the device has done it.
        record: a fence behind what has been copied.
    """

    def __init__(
        self,
        pieces: Iterator[_Piece],
        copy: Callable[[_Piece], None],
        record: Callable[[], Fence],
    ) -> None:
        self._pieces = pieces
        self._copy = copy
        self._record = record
        self._fence: Fence | None = None
        self._failure: Exception | None = None

    def advance(self, deadline: float) -> bool:
        """Copy until then, at least one piece; whether all of it is there.

        Raises:
            Exception: what an operation raised, when all that was begun has ended.
        """
        while self._fence is None:
            piece = None if self._failure else next(self._pieces, None)
            if piece is None:
                self._fence = self._record()
                break
            try:
                self._copy(piece)
            except Exception as error:  # noqa: BLE001 - raised again below
                self._failure = error
            if time.monotonic() > deadline:
                return False
        if not self._fence():
            return False
        if self._failure is not None:
            raise self._failure
        return True


class HostBuffer:
    """The copy, and the ways there and back.

    Args:
        caches: the caches on the device.
        record: a fence behind the copies that this thread has launched.
        stream: what the copies are launched in, so that they do not wait for the
            computation of later steps.

    ``host`` has the tensors of the copy; they lie as those of the caches do.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        record: Callable[[], Fence],
        stream: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._caches = dict(caches)
        self.host = _mirrored(self._caches)
        self._record = record
        self._stream = stream
        self._regions: tuple[RegionInfo, ...] = ()
        self._operation: CopyOperation | None = None

    def bind(self, regions: tuple[RegionInfo, ...]) -> None:
        """The description of ``host``."""
        self._regions = regions

    def use(self, operation: CopyOperation) -> None:
        """The engine gives the operation that copies; it does so at its start."""
        self._operation = operation

    def out_of_device(
        self, blocks: Sequence[BlockArray], part: int = 0, parts: int = 1
    ) -> BlockCopy:
        """A copy to the host of a part of the layers, of these blocks per group."""
        chosen = [
            region
            for region, of in zip(
                self._regions, parts_of_regions(self._regions, parts), strict=True
            )
            if of == part
        ]
        return self._copy(chosen, blocks, "d2h")

    def into_device(self, blocks: Sequence[BlockArray]) -> BlockCopy:
        """A copy to the device of these blocks per group."""
        return self._copy(self._regions, blocks, "h2d")

    def _copy(
        self,
        regions: Sequence[RegionInfo],
        blocks: Sequence[BlockArray],
        direction: Literal["h2d", "d2h"],
    ) -> BlockCopy:
        def copy(piece: _Piece) -> None:
            if self._operation is None:
                raise RuntimeError("the engine has given no operation that copies KV")
            there = {piece.layer: self._caches[piece.layer]}
            here = {piece.layer: self.host[piece.layer]}
            source, target = (there, here) if direction == "d2h" else (here, there)
            with self._stream():
                self._operation(source, target, piece.blocks, piece.blocks, direction)

        def record() -> Fence:
            with self._stream():
                return self._record()

        return BlockCopy(_pieces(regions, blocks), copy, record)


def _pieces(
    regions: Sequence[RegionInfo], blocks: Sequence[BlockArray]
) -> Iterator[_Piece]:
    for region in regions:
        ids = blocks[region.group]
        if region.window:
            # Block 0 stands for one that was let go of.
            ids = ids[ids != 0]
        ratio = region.kernel_blocks
        kernel = (ids.astype(np.int64)[:, None] * ratio + np.arange(ratio)).ravel()
        count = max(1, PIECE_BYTES * ratio // region.page_bytes)
        for begin in range(0, len(kernel), count):
            yield _Piece(region.layer, kernel[begin : begin + count].tolist())


def _mirrored(caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the host that lie as these do, and share what these share."""
    storages: dict[int, torch.UntypedStorage] = {}
    host: dict[str, torch.Tensor] = {}
    for layer, cache in caches.items():
        whole = cache.untyped_storage()
        if whole.data_ptr() not in storages:
            # Not pinned: the platforms' operations copy through a buffer of their own.
            room = torch.zeros(whole.nbytes(), dtype=torch.uint8)
            storages[whole.data_ptr()] = room.untyped_storage()
        host[layer] = torch.empty(0, dtype=cache.dtype).set_(
            storages[whole.data_ptr()],
            cache.storage_offset(),
            cache.shape,
            cache.stride(),
        )
    return host
