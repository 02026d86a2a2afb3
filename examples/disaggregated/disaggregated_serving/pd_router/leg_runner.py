# SPDX-License-Identifier: Apache-2.0
"""Runs single legs: counts them, times them, translates their failures."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from .attempts import Answer, Attempt
from .blame import blamed
from .config import Role, RouterConfig
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
from .rewrite import prefill_body, prefill_params, with_params
from .side_channel import SideChannelClient
from .workers import Lease, NoWorkerError, Preference, Registry, Worker

logger = logging.getLogger("pd_router")

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


class TooLateError(Exception):
    """Another decode leg of the same attempt has answered before."""


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
        self,
        attempt: Attempt,
        role: Role,
        excluded: Collection[Worker] = (),
        prefer: Preference | None = None,
    ) -> Lease:
        """Choose a worker for a leg of this attempt.

        Raises:
            HandoffError: no worker of the role is available.
        """
        if role is Role.DECODE:
            prefer = prefer or attempt.plan.prefer
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

    def alone(
        self, attempt: Attempt, excluded: Collection[Worker]
    ) -> tuple[Worker, str] | None:
        """The decode worker for which a prefill leg is not worth it, and why."""
        below = self.config.routing.skip_below
        if not below:
            return None
        try:
            sink = self.workers.choose(
                attempt.work(Role.DECODE), excluded, attempt.plan.prefer
            )
        except NoWorkerError:
            return None
        prompt = attempt.call.prompt
        if prompt.tokens < below:
            return sink, "short_prompt"
        if prompt.tokens - sink.prefixes.tokens(prompt.chunks) < below:
            return sink, "cached_at_decode"
        return None

    async def serve_alone(
        self, attempt: Attempt, sink: Worker | None, reason: str, stack: AsyncExitStack
    ) -> Answer:
        """Let a decode worker, this one if given, compute the prompt itself.

        Raises:
            RouterError: it could not.
        """
        lease = self.acquire(attempt, Role.DECODE, prefer=lambda _: sink)
        worker = stack.enter_context(lease)
        self.metrics.local_prefill(reason)
        logger.info("%s is served without a hand-off: %s", attempt, reason)
        return await stack.enter_async_context(self.decode(attempt, worker, None))

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
            TooLateError: another one has answered before.
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
            if not attempt.take(worker, content):
                if isinstance(content, EventStream):
                    content.close()
                raise TooLateError
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

    async def handed_over(self, attempt: Attempt, sink: Worker) -> bool:
        """Whether an engine says that ``sink`` has got the KV; it may not be known."""
        asked = (sink, attempt.prefill)
        return await self._side_channels.ended(
            attempt.transfer_id, [worker for worker in asked if worker is not None]
        )

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
        if attempt.rebound and len(roles) > 1:
            # Of two engines that ask for one hand-off, one may be told that the other
            # has got it.
            return
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
