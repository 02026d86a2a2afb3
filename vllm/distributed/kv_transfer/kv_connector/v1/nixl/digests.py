# SPDX-License-Identifier: Apache-2.0
"""Digests of token ids: BLAKE2b over them as native 64-bit integers.

Compiled code computes them where it is built; hashlib gives the same bytes.
"""

import hashlib
from array import array
from collections.abc import Sequence

from .native import NATIVE, Native


def token_digest(
    tokens: Sequence[int], size: int, native: Native | None = NATIVE
) -> bytes:
    """The digest of ``tokens``, of ``size`` bytes; empty where there are none."""
    return token_digests(tokens, len(tokens), size, native) if tokens else b""


def token_digests(
    tokens: Sequence[int], block: int, size: int, native: Native | None = NATIVE
) -> bytes:
    """One digest per full block, each of all tokens up to that block's end.

    Args:
        tokens: token ids.
        block: tokens per block, at least 1.
        size: bytes per digest, 1 to 64.
        native: the compiled code to use, or None for hashlib.

    Raises:
        OverflowError, TypeError: a token is no integer of 64 bits.
    """
    if native is not None and isinstance(tokens, list):
        return native.compiled.token_digests(tokens, block, size, native.tokens)
    running = hashlib.blake2b(digest_size=size)
    digests: list[bytes] = []
    for start in range(0, len(tokens) - block + 1, block):
        running.update(array("q", tokens[start : start + block]).tobytes())
        digests.append(running.copy().digest())
    return b"".join(digests)
