# SPDX-License-Identifier: Apache-2.0
"""How long a step that computes nothing waits for news of the transfers.

The engine steps without pause while a request is parked, and each such step wakes all
its processes. A step that has nothing to compute is worth taking when there is news;
until then a new request of the engine has to wait for its end, too.
"""

from collections.abc import Iterable

from ..commands import Command, Receive
from ..ids import Mode

WAIT_SECONDS = (0.0005, 0.005)
"""Shortest and longest wait."""

WAIT_SHARE = 1 / 16
"""The wait as a share of the time without news."""

READ_SECONDS = 0.004
"""Shortest wait of the step that orders a READ, most of which end within it."""


class Idling:
    """The waits of one worker's steps.

    Args:
        now: seconds, on any one clock.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._computes = True
        self._reads = False

    def begin(self, computes: bool, orders: Iterable[Command], now: float) -> None:
        """A step begins, with or without something to compute, and with orders."""
        orders = tuple(orders)
        self._computes = computes
        self._reads = any(_reads(order) for order in orders)
        if computes or orders:
            self._since = now

    def heard(self, now: float) -> None:
        """There is news."""
        self._since = now

    def wait(self, now: float) -> float:
        """Seconds that this step may wait for news."""
        if self._computes:
            return 0.0
        shortest, longest = WAIT_SECONDS
        if self._reads:
            shortest = READ_SECONDS
        return min(max((now - self._since) * WAIT_SHARE, shortest), longest)


def _reads(order: Command) -> bool:
    return isinstance(order, Receive) and order.request.mode is Mode.PULL
