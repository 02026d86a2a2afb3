# SPDX-License-Identifier: Apache-2.0
"""What identifies a prompt on both sides of a hand-off."""

from collections.abc import Sequence

from ..digests import token_digest


def prompt_digest(token_ids: Sequence[int] | None) -> bytes:
    """A digest of the token ids; empty where there are none (prompt embeddings)."""
    return token_digest(token_ids or (), 16)
