# SPDX-License-Identifier: Apache-2.0
"""Block ids as bytes, and what stands for them."""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .codec import WireError

DIGEST_BYTES = 16
"""Length of what stands for block ids, or for a block's content in :class:`.Kept`."""

BlockArray: TypeAlias = npt.NDArray[np.int32]


def pack_blocks(blocks: npt.ArrayLike) -> bytes:
    """Block ids as little-endian int32."""
    return np.asarray(blocks, dtype="<i4").tobytes()


def unpack_blocks(data: bytes) -> BlockArray:
    """The inverse of :func:`pack_blocks`; raises :class:`WireError`."""
    if len(data) % 4:
        raise WireError(f"block list of {len(data)} bytes is not a list of int32")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def blocks_digest(groups: Iterable[npt.ArrayLike]) -> bytes:
    """What stands for the block ids of all groups, in their order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for group in groups:
        packed = pack_blocks(group)
        digest.update(len(packed).to_bytes(8, "little"))
        digest.update(packed)
    return digest.digest()
