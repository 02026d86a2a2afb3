# SPDX-License-Identifier: Apache-2.0
"""Keeps the workers' health up to date."""

import asyncio
import logging

from .legs import Backend, LegError
from .workers import Registry, Worker

logger = logging.getLogger("pd_router")


class HealthMonitor:
    """Asks every worker for ``/health`` at a fixed interval, in seconds."""

    def __init__(
        self, workers: Registry, backend: Backend, interval: float, limit: float
    ) -> None:
        self._workers = workers
        self._backend = backend
        self._interval = interval
        self._limit = limit

    async def run(self) -> None:
        """Check for ever; the first round starts at once."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._interval)

    async def check_all(self) -> None:
        """Check every worker once."""
        await asyncio.gather(*(self.check(worker) for worker in self._workers))

    async def check(self, worker: Worker) -> None:
        """Check one worker and note the result."""
        try:
            reply = await self._backend.get(worker, "/health", self._limit)
        except LegError as error:
            reason = str(error)
        else:
            if reply.status == 200:
                if worker.mark_up():
                    logger.info("%s is healthy", worker)
                return
            reason = f"/health answered {reply.status}"
        if worker.note_failed_poll(reason):
            logger.warning("%s is unhealthy: %s", worker, reason)
