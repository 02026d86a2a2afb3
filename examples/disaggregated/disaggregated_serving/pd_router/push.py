# SPDX-License-Identifier: Apache-2.0
"""Push: both legs go out together; prefill writes into decode's cache."""

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack

from .attempts import Answer, Attempt
from .blame import lost_prefill
from .config import Role
from .dispatch import Dispatcher, logger, settle, start
from .errors import Cause, HandoffError, Reply
from .rewrite import push_decode_params
from .workers import Worker


class PushDispatcher(Dispatcher):
    """Chooses both engines first and runs both legs at the same time."""

    def retryable(self, error: HandoffError) -> bool:
        """A prefill leg that was refused or lost for a passing reason.

        Decode knows of one prefill engine only, so both legs go out again. A decode
        leg that its engine has seen is left at that.
        """
        return error.cause is Cause.DECODE_CONNECT or lost_prefill(error)

    async def attempt(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        """Run both legs until decode answers or one of them fails."""
        legs = self.legs
        prefill_lease = legs.acquire(attempt, Role.PREFILL, excluded)
        source = stack.enter_context(prefill_lease)
        sink = stack.enter_context(legs.acquire(attempt, Role.DECODE, excluded))
        channel = source.spec.side_channel
        if channel is None:
            raise RuntimeError(f"{source} was registered without a side channel")
        logger.info("%s dispatched", attempt)
        params = push_decode_params(attempt.transfer_id, channel)
        # Entered by its own task but left by this one, hence the stack of its own.
        inner = AsyncExitStack()
        stack.push_async_exit(inner)
        decode = start(
            stack, inner.enter_async_context(legs.decode(attempt, sink, params))
        )
        prefill = start(stack, self.prefill(attempt, source, excluded))
        prefill.add_done_callback(lambda _: prefill_lease.release())
        stack.push_async_callback(settle, prefill, attempt)
        return await _first_to_decide(prefill, decode)


async def _first_to_decide(
    prefill: asyncio.Task[Reply], decode: asyncio.Task[Answer]
) -> Answer:
    """The decode leg's answer, unless the prefill leg fails before it."""
    await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
    if prefill.done():
        # Raises what went wrong there: decode then waits for what never comes.
        prefill.result()
    return await decode
