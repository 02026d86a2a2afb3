# SPDX-License-Identifier: Apache-2.0
"""Which beginnings of prompts a worker has been given: no I/O, no contents."""

from collections import OrderedDict
from collections.abc import Sequence

from .prompt_size import CHUNK_TOKENS


class PrefixMemory:
    """The beginnings that were used last, as the worker's own cache keeps them.

    Args:
        tokens: how many are remembered; more than the worker's cache holds would
            be remembered in vain.
    """

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens // CHUNK_TOKENS
        # In the order of their last use, a beginning after what it begins.
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """How many chunks are remembered."""
        return len(self._chunks)

    def note(self, chunks: Sequence[bytes]) -> None:
        """The worker has been given a prompt with these chunks."""
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)

    def tokens(self, chunks: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that the worker has been given before."""
        known = 0
        for chunk in chunks:
            if chunk not in self._chunks:
                break
            known += CHUNK_TOKENS
        return known

    def clear(self) -> None:
        """The worker has lost its cache."""
        self._chunks.clear()
