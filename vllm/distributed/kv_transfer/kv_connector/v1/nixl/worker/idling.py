# SPDX-License-Identifier: Apache-2.0
"""How long a step that computes nothing waits for news of the transfers.

The engine steps without pause while a request is parked, and each such step wakes all
its processes. A step that has nothing to compute is worth taking when there is news;
until then a new request of the engine has to wait for its end, too.
"""

WAIT_SECONDS = (0.0005, 0.005)
"""Shortest and longest wait."""

WAIT_SHARE = 1 / 16
"""The wait as a share of the time without news."""


class Idling:
    """The waits of one worker's steps.

    Args:
        now: seconds, on any one clock.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._computes = True

    def begin(self, computes: bool, has_orders: bool, now: float) -> None:
        """A step begins, with or without something to compute, and with orders."""
        self._computes = computes
        if computes or has_orders:
            self._since = now

    def heard(self, now: float) -> None:
        """There is news."""
        self._since = now

    def wait(self, now: float) -> float:
        """Seconds that this step may wait for news."""
        if self._computes:
            return 0.0
        shortest, longest = WAIT_SECONDS
        return min(max((now - self._since) * WAIT_SHARE, shortest), longest)
