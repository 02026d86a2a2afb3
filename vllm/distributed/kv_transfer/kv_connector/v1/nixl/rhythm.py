# SPDX-License-Identifier: Apache-2.0
"""When the transfer thread looks again, which NIXL gives nothing to wait for.

Frequent looks find things soon, and cost some 40 µs of CPU time each; where the
forward thread computes in Python they cost that thread 0.1 ms each, if the
interpreter is wanted at once. So the time between two looks follows the time that has
been waited already, and the interpreter is wanted at once only where something moves
or has just happened. Afterwards a busy forward thread slows the looks down by itself.
"""

from .orders import Pace

MOVING_SECONDS = (0.00002, 0.001)
"""Shortest and longest wait while something moves."""

MOVING_SHARE = 1 / 32
"""The wait as a share of the time for which something has moved."""

SOON_SECONDS = (0.0001, 0.0005)
"""Shortest and longest wait for an answer, if something has just happened."""

SOON_SHARE = 1 / 32
"""The wait as a share of the time for which nothing has happened."""

EAGER_SECONDS = 0.02
"""For so long after something has happened, the answer is wanted at once."""

PATIENT_SECONDS = 0.001
"""Wait for an answer that did not come by then, or for a question."""

LATER_SECONDS = 0.004
"""Wait for a message that nothing depends on yet, or for a question while the forward
thread computes."""

RELAXED_SECONDS = 0.04
"""Wait while only a first contact can come."""


class Rhythm:
    """The waits between the steps of one transfer loop.

    Args:
        now: seconds, as all times here, on any one clock.

    Attributes:
        wait: how long to wait for orders before the next step.
        eager: whether the interpreter is wanted at once when the wait ends.
    """

    def __init__(self, now: float) -> None:
        self._stirred_at = now
        self._moving_since: float | None = None
        self.wait = RELAXED_SECONDS
        self.eager = False

    def stepped(
        self, pace: Pace, ordered: bool, computes: bool, began: float, now: float
    ) -> None:
        """A step has ended; sets what follows.

        Args:
            pace: what the step has said.
            ordered: whether it had orders to obey.
            computes: whether the forward thread does.
            began: when it began.
            now: when it ended.
        """
        if ordered or pace is Pace.NOW:
            self._stirred_at = now
        if pace is not Pace.NOW:
            self._moving_since = None
        elif self._moving_since is None or ordered:
            self._moving_since = now
        if self._moving_since is not None:
            wait = _share(now - self._moving_since, MOVING_SHARE, MOVING_SECONDS)
            # A step that has posted took long, and has more to post.
            self.wait = MOVING_SECONDS[0] if now - began > wait else wait
            self.eager = True
        elif pace is Pace.SOON:
            silence = now - self._stirred_at
            self.eager = silence < EAGER_SECONDS
            self.wait = (
                _share(silence, SOON_SHARE, SOON_SECONDS)
                if self.eager
                else PATIENT_SECONDS
            )
        else:
            self.wait, self.eager = _unhurried(pace, computes), False


def _unhurried(pace: Pace, computes: bool) -> float:
    if pace is Pace.RELAXED:
        return RELAXED_SECONDS
    return LATER_SECONDS if pace is Pace.LATER or computes else PATIENT_SECONDS


def _share(of: float, share: float, bounds: tuple[float, float]) -> float:
    return min(max(of * share, bounds[0]), bounds[1])
