# SPDX-License-Identifier: Apache-2.0
"""What every way of serving a request shares: legs, retries, clean-up."""

import asyncio
import functools
import json
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from .blame import OUT_OF_SERVICE, blamed
from .config import Role, RouterConfig
from .conversations import Key
from .errors import Cause, HandoffError, Reply
from .failures import decode_failure, prefill_failure
from .legs import (
    Backend,
    ErrorEventError,
    EventStream,
    Failure,
    LegError,
    StatusError,
)
from .metrics import Metrics
from .plan import Plan
from .prompt_size import PromptSize
from .rewrite import prefill_body, prefill_params, with_params
from .side_channel import SideChannelClient
from .workers import Lease, NoWorkerError, Registry, Work, Worker

logger = logging.getLogger("pd_router")

T = TypeVar("T")

# Failures that left no hand-off behind which an engine could tell about.
_NEVER_BEGUN = frozenset(
    {
        Cause.PREFILL_CONNECT,
        Cause.DECODE_CONNECT,
        Cause.NO_WORKER,
        Cause.CIRCUIT_OPEN,
        Cause.SHUTDOWN,
    }
)

# Before a prefill engine that is out of service is asked again, where it is the only
# one; what it asks for itself in Retry-After counts up to the second value.
_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 2.0

# A prefill answer that is on its way when the decode answer is complete.
_PREFILL_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Call:
    """One prompt that a client wants served, perhaps as a conversation's turn."""

    path: str
    body: Mapping[str, Any]
    request_id: str
    headers: Mapping[str, str]
    conversation: Key | None = None

    @functools.cached_property
    def prompt(self) -> PromptSize:
        """Estimates for its prompt."""
        return PromptSize(self.body)

    @property
    def streaming(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.body.get("stream"))


class Tries:
    """How many more may be made for a call, whole ones or single legs."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self) -> bool:
        """Make use of one, if there is one left."""
        self._left -= 1
        return self._left >= 0


class Attempt:
    """One try at serving a call; its id is on both legs and on no other try."""

    def __init__(self, call: Call, tries: Tries) -> None:
        self.call = call
        self.tries = tries
        self.transfer_id = uuid.uuid4().hex
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.content: Reply | EventStream | None = None
        self.plan = Plan()
        self.leases: dict[Worker, Lease] = {}

    def work(self, role: Role) -> Work:
        """What a leg of it gives a worker to do."""
        return Work(role, self.call.body, self.call.prompt)

    def end(self) -> None:
        """All its legs have ended."""
        for lease in self.leases.values():
            lease.permit.end()
        self.plan.end()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of both legs.

        Engines derive their request ids from these, so parts of a split list and
        retries must not share one.
        """
        leg_id = f"{self.call.request_id}-{self.transfer_id}"
        return {**self.call.headers, "X-Request-Id": leg_id}

    def blame(self, worker: Worker) -> None:
        """Count a failure of a worker that took part."""
        lease = self.leases.get(worker)
        if lease is not None and lease.permit.failure():
            logger.warning(
                "%s has failed %d times in a row and is out of the choice for %.1f s",
                worker,
                worker.breaker.failures,
                worker.breaker.retry_in,
            )

    def complete(self) -> bool:
        """Whether the decode leg has given all it has."""
        content = self.content
        return isinstance(content, Reply) or (content is not None and content.completed)

    def __str__(self) -> str:
        return (
            f"transfer={self.transfer_id} request={self.call.request_id} "
            f"prefill={self.prefill and self.prefill.address} "
            f"decode={self.decode and self.decode.address}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The decode side's answer to a call, known not to begin with a failure."""

    attempt: Attempt
    content: Reply | EventStream


class Legs:
    """Runs single legs: counts them, times them, translates their failures."""

    def __init__(
        self,
        config: RouterConfig,
        workers: Registry,
        backend: Backend,
        metrics: Metrics,
        side_channels: SideChannelClient,
    ) -> None:
        self.config = config
        self.workers = workers
        self.metrics = metrics
        self._backend = backend
        self._side_channels = side_channels

    def acquire(
        self, attempt: Attempt, role: Role, excluded: Collection[Worker] = ()
    ) -> Lease:
        """Choose a worker for a leg of this attempt.

        Raises:
            HandoffError: no worker of the role is available.
        """
        prefer = attempt.plan.prefer if role is Role.DECODE else None
        try:
            lease = self.workers.acquire(attempt.work(role), excluded, prefer)
        except NoWorkerError as error:
            raise self.none_left(attempt, error) from error
        attempt.leases[lease.worker] = lease
        if role is Role.PREFILL:
            attempt.prefill = lease.worker
            self._remember(attempt, lease.worker)
        else:
            attempt.decode = lease.worker
        return lease

    def none_left(self, attempt: Attempt, error: NoWorkerError) -> HandoffError:
        """The failure of an attempt that finds no worker of a role."""
        seconds = error.retry_in
        return HandoffError(
            Cause.NO_WORKER if seconds is None else Cause.CIRCUIT_OPEN,
            str(error),
            transfer_id=attempt.transfer_id,
            retry_after=None if seconds is None else str(max(1, math.ceil(seconds))),
        )

    async def prefill(self, attempt: Attempt, worker: Worker) -> Reply:
        """Run the prefill leg to its end.

        Raises:
            RouterError: the leg failed.
        """
        call = attempt.call
        body = with_params(
            prefill_body(call.body, keep_tool_choice=self.config.keep_tool_choice),
            {
                **prefill_params(attempt.transfer_id, call.body),
                **attempt.plan.prefill_params(),
            },
        )
        with self._timed(Role.PREFILL) as result:
            try:
                reply = await self._backend.post(
                    worker,
                    call.path,
                    json.dumps(body).encode(),
                    attempt.headers,
                    self.config.timeouts.prefill,
                )
            except (LegError, StatusError) as error:
                self._note(attempt, error, handoff=True)
                logger.warning("%s prefill leg failed: %s", attempt, error)
                raise prefill_failure(error, attempt.transfer_id) from error
            result.value = "ok"
            attempt.plan.prefilled(reply)
            return reply

    @asynccontextmanager
    async def decode(
        self, attempt: Attempt, worker: Worker, params: Mapping[str, Any] | None
    ) -> AsyncIterator[Answer]:
        """Run the decode leg for as long as the context lasts.

        Without ``params`` the engine computes the prompt itself.

        Raises:
            RouterError: the leg failed before there was an answer.
        """
        call = attempt.call
        body = call.body
        if params is not None:
            added = attempt.plan.decode_params(worker)
            body = with_params(body, {**params, **added})
        with self._timed(Role.DECODE) as result:
            try:
                content = await self._backend.open(
                    worker,
                    call.path,
                    json.dumps(body).encode(),
                    attempt.headers,
                    streaming=call.streaming,
                )
            except (LegError, StatusError, ErrorEventError) as error:
                self._note(attempt, error, handoff=params is not None)
                logger.warning("%s decode leg failed: %s", attempt, error)
                raise decode_failure(
                    error, attempt.transfer_id, handoff=params is not None
                ) from error
            attempt.content = content
            self._note_success(attempt, worker, handoff=params is not None)
            self._remember(attempt, worker)
            attempt.plan.answered()
            if isinstance(content, Reply):
                attempt.plan.finished(content)
            else:
                content.on_completed = lambda: attempt.plan.finished(None)
            try:
                yield Answer(attempt, content)
            finally:
                if isinstance(content, EventStream):
                    content.close()
                if attempt.complete():
                    result.value = "ok"

    async def explain(self, attempt: Attempt, error: HandoffError) -> None:
        """Add to a failure what the engines say about it, if they can be asked."""
        if error.cause in _NEVER_BEGUN:
            return
        asked = [w for w in (attempt.decode, attempt.prefill) if w is not None]
        if attempt.decode and attempt.decode.spec.report_address is None:
            return
        error.detail = await self._side_channels.explain(attempt.transfer_id, asked)
        if error.detail is not None:
            logger.warning("%s failed: %s", attempt, error.detail)

    def _remember(self, attempt: Attempt, worker: Worker) -> None:
        """Note which prompt a worker's cache has, where anybody will ask."""
        if self.config.routing.remembers:
            worker.prefixes.note(attempt.call.prompt.chunks)

    def _timed(self, role: Role) -> "_LegTimer":
        return _LegTimer(self.metrics, role)

    def _note(
        self,
        attempt: Attempt,
        error: LegError | StatusError | ErrorEventError,
        *,
        handoff: bool,
    ) -> None:
        worker = error.worker
        refused = isinstance(error, LegError) and error.kind is Failure.CONNECT
        if refused and worker.mark_down(str(error)):
            logger.warning("%s is unreachable and out of the choice", worker)
        roles = blamed(error, handoff=handoff)
        other = attempt.prefill if worker.role is Role.DECODE else attempt.decode
        for one in (worker, other):
            if one is not None and one.role in roles:
                attempt.blame(one)

    def _note_success(self, attempt: Attempt, sink: Worker, *, handoff: bool) -> None:
        # A prefill engine has done its part when its KV has come, not before.
        for worker in (sink, attempt.prefill if handoff else None):
            lease = attempt.leases.get(worker) if worker else None
            if lease is not None and lease.permit.success():
                logger.info("%s answers again and is back in the choice", worker)


class _LegTimer:
    """Notes a leg's length and result when it ends, however it ends."""

    def __init__(self, metrics: Metrics, role: Role) -> None:
        self._metrics = metrics
        self._role = role
        self.value = "failed"

    def __enter__(self) -> "_LegTimer":
        self._started = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(exception[1], (asyncio.CancelledError, GeneratorExit)):
            self.value = "cancelled"
        self._metrics.leg(str(self._role), self.value, time.monotonic() - self._started)


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
                    answer = await self.attempt(attempt, excluded, stack)
                except HandoffError as error:
                    failure = error
                else:
                    yield answer
                    return
            self.legs.metrics.handoff_failure(failure.cause)
            if not self._another(failure, excluded) or not tries.take():
                # By now all legs have ended, so nobody waits for the answer but
                # the client.
                await self.explain(attempt, failure)
                raise failure
            self.legs.metrics.retry(failure.cause)
            logger.info("%s is tried again: %s", attempt, failure)

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

    def _another(self, error: HandoffError, excluded: set[Worker]) -> bool:
        worker = error.worker
        if worker is None or not self.retryable(error):
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
        worker = stack.enter_context(self.legs.acquire(attempt, Role.DECODE))
        self.legs.metrics.local_prefill("unsupported_fields")
        logger.info("%s is served without a hand-off", attempt)
        return await stack.enter_async_context(self.legs.decode(attempt, worker, None))

    async def explain(self, attempt: Attempt, error: HandoffError) -> None:
        """Ask nobody: there was no hand-off."""


def _pause(error: HandoffError) -> float:
    try:
        asked = float(error.asked_pause or _PAUSE_SECONDS)
    except ValueError:
        # It may be a date.
        asked = _PAUSE_SECONDS
    return min(max(asked, 0.0), _LONGEST_PAUSE_SECONDS)


def start(stack: AsyncExitStack, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a leg beside others; leaving ``stack`` cancels it and waits for it."""
    task = asyncio.create_task(work)
    # Its failure may come after everybody has stopped listening.
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    stack.push_async_callback(_stop, task)
    return task


async def _stop(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


async def settle(task: asyncio.Task[Any], attempt: Attempt) -> None:
    """Give a leg that is no longer needed the time to end by itself."""
    if attempt.complete() and not task.done():
        await asyncio.wait({task}, timeout=_PREFILL_GRACE_SECONDS)
