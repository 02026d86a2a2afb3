# SPDX-License-Identifier: Apache-2.0
"""What every way of serving a request shares: tries and clean-up."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from .attempts import Answer, Attempt, Call, Tries
from .blame import OUT_OF_SERVICE
from .config import Role
from .errors import HandoffError, Reply
from .leg_runner import Legs
from .plan import Plan
from .tasks import logger
from .workers import Worker

# Before a prefill engine that is out of service is asked again, where it is the only
# one; what it asks for itself in Retry-After counts up to the second value.
_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 2.0

# A prefill answer that is on its way when the decode answer is complete.
_PREFILL_GRACE_SECONDS = 1.0


Planner: TypeAlias = Callable[[Attempt], Plan]
"""Makes the plan of an attempt that is about to begin."""


class Dispatcher(ABC):
    """A way of serving a call. Leaving ``open`` ends every leg still running."""

    def __init__(self, legs: Legs, planner: Planner | None = None) -> None:
        self.legs = legs
        self._planner = planner

    @abstractmethod
    async def attempt(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        """Run one attempt until its outcome shows; clean-up goes to ``stack``."""

    def retryable(self, error: HandoffError) -> bool:
        """Whether another attempt without the failed worker may be made."""
        return False

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Answer]:
        """Serve a call; yields once there is an answer to pass on.

        Raises:
            RouterError: there is none.
        """
        excluded: set[Worker] = set()
        tries = Tries(self.legs.config.retries)
        while True:
            attempt = Attempt(call, tries)
            async with AsyncExitStack() as stack:
                if self._planner is not None:
                    attempt.plan = self._planner(attempt)
                stack.callback(attempt.end)
                try:
                    answer = await self._serve(attempt, excluded, stack)
                except HandoffError as error:
                    failure = error
                else:
                    yield answer
                    return
            self.legs.metrics.handoff_failure(failure.cause)
            if not self._another(attempt, failure, excluded) or not tries.take():
                # By now all legs have ended, so nobody waits for the answer but
                # the client.
                await self.explain(attempt, failure)
                raise failure
            self.legs.metrics.retry(failure.cause)
            logger.info("%s is tried again: %s", attempt, failure)

    async def _serve(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        alone = self.legs.alone(attempt, excluded)
        if alone is None:
            return await self.attempt(attempt, excluded, stack)
        return await self.legs.serve_alone(attempt, *alone, stack)

    async def explain(self, attempt: Attempt, error: HandoffError) -> None:
        """Ask the engines why a hand-off failed."""
        await self.legs.explain(attempt, error)

    async def prefill(
        self, attempt: Attempt, worker: Worker, excluded: Collection[Worker]
    ) -> Reply:
        """Run the prefill leg; again there while that is all that can be done.

        That is when the engine is out of service and there is no other one. The
        decode leg, if it runs, goes on waiting for the same hand-off, of which the
        engine cannot know yet.

        Raises:
            RouterError: the leg failed.
        """
        while True:
            try:
                return await self.legs.prefill(attempt, worker)
            except HandoffError as error:
                if (
                    error.worker_status not in OUT_OF_SERVICE
                    or self._others(worker, excluded)
                    or not worker.breaker.admits
                    or not attempt.tries.take()
                ):
                    raise
                self.legs.metrics.handoff_failure(error.cause)
                self.legs.metrics.retry(error.cause)
                attempt.leases[worker].renew()
                await asyncio.sleep(_pause(error))
                logger.info("%s: its prefill leg is tried again: %s", attempt, error)

    def _another(
        self, attempt: Attempt, error: HandoffError, excluded: set[Worker]
    ) -> bool:
        worker = error.worker
        if worker is None:
            return False
        if attempt.rebound and worker.role is Role.DECODE:
            # The first engine may have let go of the hand-off for the second one,
            # too. The prompt is still in the prefill engine's cache.
            excluded |= attempt.lost
            return True
        if not self.retryable(error):
            return False
        excluded.add(worker)
        return self._others(worker, excluded)

    def _others(self, worker: Worker, excluded: Collection[Worker]) -> bool:
        return any(
            other is not worker and other not in excluded
            for other in self.legs.workers.available(worker.role)
        )


class LocalDispatcher(Dispatcher):
    """The decode engine serves the call alone, prompt included."""

    async def attempt(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        """Run the only leg."""
        return await self.legs.serve_alone(attempt, None, "unsupported_fields", stack)

    async def _serve(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        return await self.attempt(attempt, excluded, stack)

    async def explain(self, attempt: Attempt, error: HandoffError) -> None:
        """Ask nobody: there was no hand-off."""


def _pause(error: HandoffError) -> float:
    try:
        asked = float(error.asked_pause or _PAUSE_SECONDS)
    except ValueError:
        # It may be a date.
        asked = _PAUSE_SECONDS
    return min(max(asked, 0.0), _LONGEST_PAUSE_SECONDS)


async def settle(task: asyncio.Task[Any], attempt: Attempt) -> None:
    """Give a leg that is no longer needed the time to end by itself."""
    if attempt.complete() and not task.done():
        await asyncio.wait({task}, timeout=_PREFILL_GRACE_SECONDS)
