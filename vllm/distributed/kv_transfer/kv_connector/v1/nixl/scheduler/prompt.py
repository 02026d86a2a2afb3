# SPDX-License-Identifier: Apache-2.0
"""What identifies a prompt on both sides of a hand-off."""

import hashlib
from array import array
from collections.abc import Sequence


def prompt_digest(token_ids: Sequence[int] | None) -> bytes:
    """A digest of the token ids; empty where there are none (prompt embeddings)."""
    if not token_ids:
        return b""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()
