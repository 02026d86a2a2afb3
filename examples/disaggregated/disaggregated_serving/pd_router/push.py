# SPDX-License-Identifier: Apache-2.0
"""Push: both legs go out together; prefill writes into decode's cache."""

from collections.abc import Collection
from contextlib import AsyncExitStack

from .attempts import Answer, Attempt
from .blame import lost_prefill
from .config import Role
from .decode_legs import DecodeLegs
from .dispatch import Dispatcher, settle
from .errors import Cause, HandoffError
from .rewrite import push_decode_params
from .tasks import logger, start
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
        sink_lease = legs.acquire(attempt, Role.DECODE, excluded)
        stack.enter_context(sink_lease)
        channel = source.spec.side_channel
        if channel is None:
            raise RuntimeError(f"{source} was registered without a side channel")
        logger.info("%s dispatched", attempt)
        params = push_decode_params(attempt.transfer_id, channel)
        # Below the decode legs on the stack, so that they end first.
        prefill = start(stack, self.prefill(attempt, source, excluded))
        prefill.add_done_callback(lambda _: prefill_lease.release())
        stack.push_async_callback(settle, prefill, attempt)
        patience = legs.config.routing.rebind_after or None
        decode = DecodeLegs(legs, attempt, params, excluded, stack, patience)
        return await decode.answer(sink_lease, prefill)
