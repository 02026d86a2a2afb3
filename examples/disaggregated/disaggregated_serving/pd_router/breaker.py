# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of a worker: no I/O, and a clock that is given.

    CLOSED ──so many failures in a row──▶ OPEN ──time is over──▶ HALF_OPEN
       ▲                                   ▲                        │
       │                                   └──── its probe fails ───┤
       └──────────────────────────────────────── its probe succeeds ┘

A leg takes a permit and says on it how it ended. What ends neither well nor badly
(the client left, the request was refused) counts for nothing. Permits of an earlier
state count for nothing either: legs that began before the breaker opened tell
nothing of the worker as it is since.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

# Each failed probe doubles the time that a breaker stays open, up to so many times.
MAX_BACKOFF = 8


class BreakerState(StrEnum):
    """Whether a worker may be chosen."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Attributes:
        failures: failures in a row that open it; 0 never opens it.
        seconds: how long it stays open the first time.
    """

    failures: int = 5
    seconds: float = 5.0


class Breaker:
    """Counts the failures of one worker and says whether it may be chosen."""

    def __init__(
        self,
        settings: BreakerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or BreakerSettings()
        self.failures = 0
        """Failures in a row."""
        self.opened = 0
        """How often it has opened."""
        self._clock = clock
        self._era = 0
        self._open_until: float | None = None
        self._backoff = 1
        self._probe: Permit | None = None

    @property
    def state(self) -> BreakerState:
        """As of now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        if self._clock() < self._open_until:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a leg may begin now; half open, one at a time."""
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and self._probe is None
        )

    @property
    def retry_in(self) -> float:
        """Seconds until it may admit a leg; 0 if it does or waits for its probe."""
        return max(0.0, (self._open_until or 0.0) - self._clock())

    def begin(self) -> "Permit":
        """Let a leg begin.

        Raises:
            RuntimeError: none is admitted.
        """
        if not self.admits:
            raise RuntimeError(f"a breaker that is {self.state} admits no leg")
        permit = Permit(self, self._era)
        if self._open_until is not None:
            self._probe = permit
        return permit

    def try_now(self) -> None:
        """Let the next leg be the probe, without waiting longer."""
        if self._open_until is not None:
            self._open_until = min(self._open_until, self._clock())

    def _succeeded(self, permit: "Permit") -> bool:
        if permit.era != self._era:
            return False
        self.failures = 0
        if self._open_until is None:
            return False
        self._open_until = self._probe = None
        self._backoff = 1
        self._era += 1
        return True

    def _failed(self, permit: "Permit") -> bool:
        if permit.era != self._era:
            return False
        self.failures += 1
        if self._open_until is not None:
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        elif not 0 < self.settings.failures <= self.failures:
            return False
        self._open_until = self._clock() + self._backoff * self.settings.seconds
        self._probe = None
        self._era += 1
        self.opened += 1
        return True

    def _ended(self, permit: "Permit") -> None:
        if self._probe is permit:
            self._probe = None


class Permit:
    """One leg's leave to run. Each outcome counts once."""

    __slots__ = ("_breaker", "_failed", "_over", "_succeeded", "era")

    def __init__(self, breaker: Breaker, era: int) -> None:
        self.era = era
        self._breaker = breaker
        self._succeeded = self._failed = self._over = False

    def success(self) -> bool:
        """The worker did what it was asked; true if that closes the breaker."""
        if self._over or self._succeeded or self._failed:
            return False
        self._succeeded = True
        return self._breaker._succeeded(self)

    def failure(self) -> bool:
        """The worker failed, perhaps after a good beginning; true if that opens it."""
        if self._over or self._failed:
            return False
        self._failed = True
        return self._breaker._failed(self)

    def end(self) -> None:
        """The leg is over; without an outcome it counts for nothing."""
        if not self._over:
            self._over = True
            self._breaker._ended(self)
