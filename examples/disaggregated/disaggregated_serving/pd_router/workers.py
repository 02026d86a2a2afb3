# SPDX-License-Identifier: Apache-2.0
"""The known workers, their load and health, and the choice among them."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias

from .balance import OutstandingRequests, Scorer
from .breaker import Breaker, BreakerSettings, BreakerState, Permit
from .config import Address, Role, WorkerSpec
from .prefixes import PrefixMemory
from .prompt_size import PromptSize
from .routing import BalanceSettings

# One lost health check is noise on a busy engine; two in a row are not.
FAILED_POLLS_UNTIL_UNHEALTHY = 2


class Worker:
    """One engine: its configuration, its health and what it is busy with."""

    __slots__ = (
        "breaker",
        "failed_polls",
        "healthy",
        "last_error",
        "last_picked",
        "load",
        "outstanding",
        "picked",
        "prefixes",
        "slow_until",
        "spec",
        "waiting",
    )

    def __init__(
        self,
        spec: WorkerSpec,
        breaker: Breaker | None = None,
        prefixes: PrefixMemory | None = None,
    ) -> None:
        self.spec = spec
        self.breaker = breaker or Breaker()
        self.prefixes = prefixes or PrefixMemory(BalanceSettings().memory_tokens)
        self.healthy = False
        self.failed_polls = 0
        self.last_error: str | None = "not checked yet"
        self.outstanding = 0
        self.load = 0.0
        self.picked = 0
        self.last_picked = 0
        # Legs that nothing else holds up: their prompts have been prefilled.
        self.waiting = 0
        # By the monotonic clock.
        self.slow_until = 0.0

    @property
    def role(self) -> Role:
        """Whether it prefills or decodes."""
        return self.spec.role

    @property
    def address(self) -> Address:
        """Where its HTTP server listens."""
        return self.spec.address

    @property
    def slow(self) -> bool:
        """Whether it has kept a request waiting so lately that others come first."""
        return time.monotonic() < self.slow_until

    def __str__(self) -> str:
        return f"{self.role} {self.address}"

    def mark_up(self) -> bool:
        """Note a passed health check; true if the worker was down."""
        changed = not self.healthy
        if changed:
            # What failed before it went away says little of it as it is now.
            self.breaker.try_now()
        self.healthy, self.failed_polls, self.last_error = True, 0, None
        return changed

    def mark_down(self, reason: str) -> bool:
        """Take it out of the choice until a health check passes."""
        changed = self.healthy
        self.healthy, self.last_error = False, reason
        # Most engines that do not answer come back with an empty cache.
        self.prefixes.clear()
        return changed

    def note_failed_poll(self, reason: str) -> bool:
        """Count a failed health check; true if that made the worker unhealthy."""
        self.failed_polls += 1
        self.last_error = reason
        if self.failed_polls < FAILED_POLLS_UNTIL_UNHEALTHY:
            return False
        return self.mark_down(reason)


@dataclass(frozen=True, slots=True)
class Work:
    """What is about to be given to a worker of ``role``."""

    role: Role
    body: Mapping[str, Any]
    size: PromptSize | None = None

    @property
    def prompt(self) -> PromptSize:
        """How long its prompt is; ``size`` where that is known already."""
        return self.size or PromptSize(self.body)


class NoWorkerError(Exception):
    """No worker of a role is left to choose from.

    ``retry_in`` is in how many seconds one may be, if the healthy ones are only out
    of the choice by their circuit breakers, else ``None``.
    """

    def __init__(self, role: Role, broken: Sequence[Worker] = ()) -> None:
        self.role = role
        self.retry_in: float | None = None
        text = f"no healthy {role} worker is available"
        if broken:
            self.retry_in = min(worker.breaker.retry_in for worker in broken)
            text = (
                f"every healthy {role} worker ({len(broken)}) has failed too often in "
                f"a row; the next trial is in {self.retry_in:.1f} s"
            )
        super().__init__(text)


Preference: TypeAlias = Callable[[Sequence[Worker]], Worker | None]
"""Picks one of several workers, or leaves the choice to their load."""


class Lease:
    """A worker's load for the length of one leg; releasing twice is harmless.

    The outcome is told on ``permit``, which may outlast the load.
    """

    __slots__ = ("_held", "cost", "permit", "worker")

    def __init__(self, worker: Worker, cost: float) -> None:
        self.worker = worker
        self.permit: Permit = worker.breaker.begin()
        self.cost = cost
        self._held = True
        worker.outstanding += 1
        worker.load += cost

    def renew(self) -> None:
        """Let the leg run once more.

        Raises:
            RuntimeError: the worker's breaker admits none.
        """
        self.permit.end()
        self.permit = self.worker.breaker.begin()

    def release(self) -> None:
        """Take the leg off the worker's load."""
        if self._held:
            self._held = False
            self.worker.outstanding -= 1
            self.worker.load -= self.cost

    def __enter__(self) -> Worker:
        return self.worker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Registry:
    """All workers; choosing one and counting it in are one step."""

    def __init__(
        self,
        scorer: Scorer | None = None,
        breakers: BreakerSettings | None = None,
        memory_tokens: int = BalanceSettings().memory_tokens,
    ) -> None:
        self.scorer: Scorer = scorer or OutstandingRequests()
        self._breakers = breakers
        self._memory_tokens = memory_tokens
        self._workers: dict[tuple[Role, Address], Worker] = {}
        self._clock = count(1)

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def add(self, spec: WorkerSpec) -> Worker:
        """Make a worker known; it is chosen once a health check has passed."""
        worker = Worker(
            spec, Breaker(self._breakers), PrefixMemory(self._memory_tokens)
        )
        self._workers[spec.role, spec.address] = worker
        return worker

    def remove(self, role: Role, address: Address) -> Worker:
        """Forget a worker; its running legs go on.

        Raises:
            KeyError: no such worker is known.
        """
        return self._workers.pop((role, address))

    def get(self, role: Role, address: Address) -> Worker | None:
        """The worker of a role that listens there, if it is known."""
        return self._workers.get((role, address))

    def healthy(self, role: Role) -> list[Worker]:
        """The workers of a role that pass their health checks."""
        return [w for w in self if w.role is role and w.healthy]

    def available(self, role: Role) -> list[Worker]:
        """The workers of a role that can be chosen now."""
        return [w for w in self.healthy(role) if w.breaker.admits]

    def ready(self) -> bool:
        """Whether a request could be served: both roles have a worker for it.

        A breaker that waits for its probe is no reason to send nothing.
        """
        return all(
            any(w.breaker.state is not BreakerState.OPEN for w in self.healthy(role))
            for role in Role
        )

    def choose(
        self,
        work: Work,
        excluded: Collection[Worker] = (),
        prefer: Preference | None = None,
    ) -> Worker:
        """The preferred or the best worker.

        Raises:
            NoWorkerError: none is available and not excluded.
        """
        healthy = [w for w in self.healthy(work.role) if w not in excluded]
        candidates = [w for w in healthy if w.breaker.admits]
        if not candidates:
            raise NoWorkerError(work.role, healthy)
        preferred = prefer and prefer(candidates)
        if preferred:
            return preferred
        ready = [worker for worker in candidates if not worker.slow]
        return self.scorer.choose(ready or candidates, work)

    def acquire(
        self,
        work: Work,
        excluded: Collection[Worker] = (),
        prefer: Preference | None = None,
    ) -> Lease:
        """Choose a worker and count the work in.

        Raises:
            NoWorkerError: none is available and not excluded.
        """
        best = self.choose(work, excluded, prefer)
        best.picked += 1
        best.last_picked = next(self._clock)
        return Lease(best, self.scorer.cost(best, work))
