# SPDX-License-Identifier: Apache-2.0
"""Tasks that end with what they were started for."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

logger = logging.getLogger("pd_router")

T = TypeVar("T")


def start(stack: AsyncExitStack, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a leg beside others; leaving ``stack`` cancels it and waits for it."""
    task = asyncio.create_task(work)
    # Its failure may come after everybody has stopped listening.
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    stack.push_async_callback(stop, task)
    return task


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task that runs, and wait until it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
