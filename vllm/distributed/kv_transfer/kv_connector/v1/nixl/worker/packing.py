# SPDX-License-Identifier: Apache-2.0
"""How the CPU attention kernels pack the tokens of a page.

They pack for the instruction set that they use. It is measured, not assumed: tokens
whose elements are numbered are stored by the kernel itself, and read back.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm import _custom_ops as ops

from ..wire.ranks import Plane

_Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CpuPacking:
    """A layer's store: the instruction set, and the types of model and cache."""

    isa: str
    head_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    cache_dtype_name: str

    @lru_cache(maxsize=64)  # noqa: B019 - layers of the same kind have it in common
    def planes(self, tokens: int, lane_bytes: int) -> tuple[Plane, ...]:
        """The planes of one head of a page: its keys, and its values."""
        item = self.cache_dtype.itemsize
        half = tokens * self.head_size
        if lane_bytes != 2 * half * item:
            return ()
        found: list[Plane] = []
        for values in (False, True):
            numbers = self._numbers(tokens, values)
            own = numbers[half:] if values else numbers[:half]
            if np.count_nonzero(numbers) != half or not own.all():
                return ()
            plane = find_plane(own - 1, tokens, self.head_size)
            found.append(
                Plane(
                    (half * values + plane.offset) * item,
                    plane.rows,
                    plane.row_stride * item,
                    plane.granule,
                    plane.granule_bytes * item,
                    plane.order,
                )
            )
        return tuple(found)

    def _numbers(self, tokens: int, values: bool) -> _Numbers:
        """Per element of a page, the number of what was stored there; 0 for none.

        Numbers are stored bit by bit: every type has a 0 and a 1.
        """
        count = tokens * self.head_size
        found = np.zeros(2 * count, dtype=np.int64)
        slots = torch.arange(tokens, dtype=torch.int64)
        nothing = torch.zeros(tokens, 1, self.head_size, dtype=self.dtype)
        for bit in range(count.bit_length()):
            page = torch.zeros(1, 1, 2 * tokens, self.head_size, dtype=self.cache_dtype)
            keys, kept = page.chunk(2, dim=2)
            ones = (torch.arange(1, count + 1) >> bit) & 1
            given = ones.reshape(nothing.shape).to(self.dtype)
            ops.cpu_attn_reshape_and_cache(
                nothing if values else given,
                given if values else nothing,
                keys,
                kept,
                slots,
                self.isa,
                kv_cache_dtype=self.cache_dtype_name,
            )
            stored = page.view(torch.uint8).numpy().reshape(2 * count, -1)
            found |= stored.any(axis=1).astype(np.int64) << bit
        return found


def find_plane(numbers: _Numbers, tokens: int, size: int) -> Plane:
    """How tokens lie where element ``i`` holds number ``token * size + dimension``.

    The plane has the smallest granule for which the elements of all granules lie
    alike; one of all tokens always does. It is told in elements instead of bytes.
    """
    return next(
        plane
        for granule in range(1, tokens + 1)
        if tokens % granule == 0
        for plane in _with_granule(numbers, granule, size)
    )


def _with_granule(numbers: _Numbers, granule: int, size: int) -> Iterator[Plane]:
    owner = numbers // (granule * size)
    begins = np.concatenate(([0], 1 + np.flatnonzero(np.diff(owner))))
    lengths = np.diff(np.concatenate((begins, [len(numbers)])))
    count = int(owner.max()) + 1
    if len(begins) % count or (lengths != lengths[0]).any():
        return
    rows, length = len(begins) // count, int(lengths[0])
    # Rows of each granule, in their order.
    starts = begins[np.argsort(owner[begins], kind="stable")].reshape(count, rows)
    stride = int(starts[0, 1] - starts[0, 0]) if rows > 1 else 0
    expected = (
        starts[0, 0]
        + np.arange(count)[:, None] * length
        + np.arange(rows)[None] * stride
    )
    if not np.array_equal(starts, expected):
        return
    inside = numbers[starts[:, :, None] + np.arange(length)]
    inside = inside - np.arange(count)[:, None, None] * granule * size
    if (inside != inside[0]).any():
        return
    plain = granule == 1 and np.array_equal(inside[0].ravel(), np.arange(size))
    order = "" if plain else hashlib.sha256(inside[0].tobytes()).hexdigest()[:16]
    yield Plane(int(starts[0, 0]), rows, stride, granule, length, order)
