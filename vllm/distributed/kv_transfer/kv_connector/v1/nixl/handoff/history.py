# SPDX-License-Identifier: Apache-2.0
"""A bounded memory of what has ended, to answer late questions about it."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class History(Generic[K, V]):
    """The ``capacity`` most recent outcomes, by key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        """Remember ``value``, forgetting the oldest entry where there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        """The outcome, or ``None`` where it never was or is forgotten."""
        return self._entries.get(key)
