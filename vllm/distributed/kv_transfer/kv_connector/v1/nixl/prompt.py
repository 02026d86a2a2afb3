# SPDX-License-Identifier: Apache-2.0
"""What identifies a prompt on both sides of a hand-off."""

from collections.abc import Sequence

from .digests import token_digest
from .later import Later

_SIZE = 16


def prompt_digest(token_ids: Sequence[int] | None) -> bytes:
    """A digest of the token ids; empty where there are none (prompt embeddings)."""
    return token_digest(token_ids or (), _SIZE)


def later_digest(token_ids: Sequence[int] | None) -> Later[bytes]:
    """The digest of the token ids as they are now; more may be appended meanwhile.

    It is empty for token ids that no engine can compute.
    """
    tokens = token_ids or ()
    count = len(tokens)

    def compute() -> bytes:
        now = tokens if len(tokens) == count else tokens[:count]
        try:
            return prompt_digest(now)
        except (OverflowError, TypeError):
            # Here nobody is left who could serve the request without a hand-off.
            return b""

    return Later(compute)
