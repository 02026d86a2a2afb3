# SPDX-License-Identifier: Apache-2.0
"""Pull: prefill first; decode reads from its cache afterwards."""

from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any

from .attempts import Answer, Attempt
from .blame import lost_prefill
from .config import Role
from .decode_legs import DecodeLegs
from .dispatch import Dispatcher
from .errors import HandoffError, Reply
from .rewrite import KV_PARAMS, pull_decode_params
from .tasks import logger
from .workers import NoWorkerError, Worker


class PullDispatcher(Dispatcher):
    """Runs prefill to its end and only then chooses where to decode.

    Unless told to choose early, which makes the two choices comparable.
    """

    def retryable(self, error: HandoffError) -> bool:
        """A prefill leg that was refused or lost for a passing reason."""
        return lost_prefill(error)

    async def attempt(
        self, attempt: Attempt, excluded: Collection[Worker], stack: AsyncExitStack
    ) -> Answer:
        """Run one leg after the other."""
        legs = self.legs
        if not legs.workers.available(Role.DECODE):
            # Prefilling for nobody would only pin the prefill engine's cache.
            raise legs.none_left(
                attempt, NoWorkerError(Role.DECODE, legs.workers.healthy(Role.DECODE))
            )
        sink = None
        if legs.config.choose_early:
            sink = legs.acquire(attempt, Role.DECODE, excluded)
            stack.enter_context(sink)
        with legs.acquire(attempt, Role.PREFILL, excluded) as source:
            logger.info("%s dispatched", attempt)
            reply = await self.prefill(attempt, source, excluded)
        params = _coordinates(reply)
        if params is None:
            legs.metrics.local_prefill("no_params_from_prefill")
            logger.warning(
                "%s: the prefill engine returned no %s, so decode computes the "
                "prompt again; is it started with a KV connector?",
                attempt,
                KV_PARAMS,
            )
        else:
            params = pull_decode_params(attempt.transfer_id, attempt.call.body, params)
        if sink is None:
            sink = legs.acquire(attempt, Role.DECODE, excluded)
            stack.enter_context(sink)
        return await DecodeLegs(legs, attempt, params, excluded, stack).answer(sink)


def _coordinates(reply: Reply) -> dict[str, Any] | None:
    value = reply.json()
    params = value.get(KV_PARAMS) if isinstance(value, dict) else None
    return params if isinstance(params, dict) else None
