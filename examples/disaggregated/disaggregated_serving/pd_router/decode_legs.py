# SPDX-License-Identifier: Apache-2.0
"""The decode leg of a hand-off, and another one that may take its place.

The second leg asks for the same hand-off, under the same ``transfer_id``, and the first
one runs on until the second has answered. So the prefill engine always has somebody to
give the KV to, and does not let go of it in between.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from .attempts import Answer, Attempt
from .blame import lost_decode
from .config import Role
from .errors import HandoffError, Reply, RouterError
from .leg_runner import Legs, TooLateError
from .rewrite import receivers
from .tasks import logger, start, stop
from .workers import Lease, NoWorkerError, Worker

POLL_SECONDS = 0.05
"""How often it is looked whether another engine would be better."""

AVOID_SECONDS = 0.5
"""How long an engine gets no new requests that had one taken from it."""


@dataclass(eq=False)
class _Leg:
    lease: Lease
    inner: AsyncExitStack
    task: asyncio.Task[Answer] = field(init=False)
    waits: bool = False

    @property
    def worker(self) -> Worker:
        return self.lease.worker

    def wait(self, waits: bool) -> None:
        """Whether nothing but the engine itself holds up its answer."""
        self.worker.waiting += waits - self.waits
        self.waits = waits


class DecodeLegs:
    """Runs them for one attempt until one answers.

    Args:
        params: what makes an engine take the hand-off; ``None`` for no hand-off.
        excluded: workers that are not to be taken.
        stack: ends all that is left.
        patience: seconds that a stream may take to begin once the prompt has been
            prefilled, before an engine that keeps none waiting is asked, too; ``None``
            to ask none.
    """

    def __init__(
        self,
        legs: Legs,
        attempt: Attempt,
        params: Mapping[str, Any] | None,
        excluded: Collection[Worker],
        stack: AsyncExitStack,
        patience: float | None = None,
    ) -> None:
        self._legs = legs
        self._attempt = attempt
        self._params = params
        self._used = set(excluded)
        self._stack = stack
        # Which of several receivers has got it is not told apart by the engines.
        single = receivers(attempt.call.body) == 1
        self._patience = patience if single else None
        self._running: list[_Leg] = []
        self._second: tuple[_Leg, str] | None = None
        self._prefilled_at: float | None = None
        self._question: asyncio.Task[bool] | None = None
        self._first: _Leg

    async def answer(
        self, lease: Lease, prefill: asyncio.Task[Reply] | None = None
    ) -> Answer:
        """The first answer of any leg; the prefill leg, if given, must not fail first.

        Raises:
            RouterError: the last leg failed, or the prefill leg did.
        """
        self._first = self._begin(lease)
        winner = "none"
        try:
            while True:
                await self._wait(prefill)
                if prefill is not None and prefill.done():
                    # Raises what went wrong there: decode waits for what never comes.
                    prefill.result()
                    if self._prefilled_at is None:
                        self._prefilled_at = _now()
                        self._count_waiting()
                answer = await self._take_in()
                if answer is not None:
                    second = self._second and self._second[0].worker
                    winner = "second" if answer[0].worker is second else "first"
                    self._judge(winner)
                    return answer[1]
                self._move()
        finally:
            if self._second is not None:
                self._legs.metrics.rebind(self._second[1], winner)

    def _judge(self, winner: str) -> None:
        """Let new requests go elsewhere while an engine keeps them waiting."""
        if winner == "first":
            self._first.worker.slow_until = 0.0
        elif self._second is not None and self._second[1] == "overloaded":
            self._first.worker.slow_until = time.monotonic() + AVOID_SECONDS

    async def _wait(self, prefill: asyncio.Task[Reply] | None) -> None:
        tasks: set[asyncio.Task[Any]] = {leg.task for leg in self._running}
        if prefill is not None and not prefill.done():
            tasks.add(prefill)
        if self._question is not None and not self._question.done():
            tasks.add(self._question)
        looks = self._patience is not None and self._second is None
        await asyncio.wait(
            tasks,
            timeout=POLL_SECONDS if looks else None,
            return_when=asyncio.FIRST_COMPLETED,
        )

    async def _take_in(self) -> tuple[_Leg, Answer] | None:
        """Look at the legs that have ended; ends the others if one has answered."""
        for leg in [leg for leg in self._running if leg.task.done()]:
            try:
                answer = leg.task.result()
            except TooLateError:
                await self._end(leg)
            except RouterError as error:
                await self._end(leg)
                self._replace(leg, error)
            else:
                leg.wait(False)
                for other in [other for other in self._running if other is not leg]:
                    await self._end(other)
                return leg, answer
        return None

    def _replace(self, leg: _Leg, error: RouterError) -> None:
        """Go on without a leg that has failed, or raise its failure."""
        metrics = self._legs.metrics
        if self._running:
            if isinstance(error, HandoffError):
                metrics.handoff_failure(error.cause)
            return
        if (
            self._second is not None
            or not isinstance(error, HandoffError)
            or not lost_decode(error)
        ):
            raise error
        target = self._target()
        if target is None or not self._attempt.tries.take():
            raise error
        metrics.handoff_failure(error.cause)
        metrics.retry(error.cause)
        self._attempt.lost.add(leg.worker)
        self._begin_second(target, leg, "lost")

    def _move(self) -> None:
        """Ask a better engine, too, if the first one has become a bad choice."""
        if self._patience is None or self._second is not None:
            return
        (leg,) = self._running
        if not leg.worker.healthy:
            target = self._target()
            if target is not None:
                self._begin_second(target, leg, "unhealthy")
        elif self._overdue():
            # Where others of this router wait, this one would have to wait, too.
            busy = [w for w in self._legs.workers if w.waiting or w.slow]
            target = self._target(busy)
            if target is None:
                self._forget_answer()
            elif self._still_open(leg):
                self._begin_second(target, leg, "overloaded")

    @property
    def _waiting_since(self) -> float | None:
        """Since when nothing but decode itself has held up the answer, if so."""
        # A whole answer does not show when it was begun.
        return self._prefilled_at if self._attempt.call.streaming else None

    def _count_waiting(self) -> None:
        for leg in self._running:
            leg.wait(self._waiting_since is not None)

    def _overdue(self) -> bool:
        since = self._waiting_since
        return since is not None and _now() - since >= (self._patience or 0.0)

    def _still_open(self, leg: _Leg) -> bool:
        """Whether the hand-off can be given to another engine; asks if unknown.

        It cannot if the first one has got the KV and keeps it in its queue: the prefill
        engine has let go of it then and would refuse.
        """
        if self._question is None:
            self._question = start(
                self._stack, self._legs.handed_over(self._attempt, leg.worker)
            )
        return self._question.done() and not self._question.result()

    def _forget_answer(self) -> None:
        """What was open a moment ago need not be so any more."""
        question = self._question
        if question is not None and question.done() and not question.result():
            self._question = None

    def _target(self, busy: Collection[Worker] = ()) -> Worker | None:
        work = self._attempt.work(Role.DECODE)
        try:
            return self._legs.workers.choose(work, {*self._used, *busy})
        except NoWorkerError:
            return None

    def _begin_second(self, target: Worker, first: _Leg, reason: str) -> None:
        lease = self._legs.acquire(self._attempt, Role.DECODE, prefer=lambda _: target)
        self._second = self._begin(lease), reason
        self._attempt.rebound = True
        logger.info(
            "%s: %s is asked for the hand-off of %s, which is %s",
            self._attempt,
            target,
            first.worker,
            reason,
        )

    def _begin(self, lease: Lease) -> _Leg:
        leg = _Leg(lease, AsyncExitStack())
        self._stack.enter_context(lease)
        # Entered by its own task but left by another, hence the stack of its own.
        self._stack.push_async_exit(leg.inner)
        leg.task = start(
            self._stack,
            leg.inner.enter_async_context(
                self._legs.decode(self._attempt, lease.worker, self._params)
            ),
        )
        self._stack.callback(leg.wait, False)
        self._used.add(lease.worker)
        self._running.append(leg)
        self._count_waiting()
        return leg

    async def _end(self, leg: _Leg) -> None:
        self._running.remove(leg)
        leg.wait(False)
        await stop(leg.task)
        await leg.inner.aclose()
        leg.lease.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
