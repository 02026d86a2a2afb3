# SPDX-License-Identifier: Apache-2.0
"""Values that the transfer thread computes in the place of the engine's thread."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Later(Generic[T]):
    """A value that is computed when it is asked for first.

    On its way to a worker in another process it is computed where it is pickled.

    Args:
        compute: makes the value; two threads may call it at the same time, and it is
            forgotten when the value is there.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    @property
    def value(self) -> T:
        """The value."""
        compute = self._compute
        if compute is not None:
            self._value = compute()
            self._compute = None
        value: T = self._value  # type: ignore[assignment]
        return value

    def __reduce__(self) -> tuple[Callable[[T], "Later[T]"], tuple[T]]:
        return _known, (self.value,)


def _known(value: T) -> Later[T]:
    return Later(lambda: value)
