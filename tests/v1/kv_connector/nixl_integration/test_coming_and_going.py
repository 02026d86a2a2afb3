# SPDX-License-Identifier: Apache-2.0
"""Many requests of all kinds at once through a router, and clients that hang up."""

from __future__ import annotations

import asyncio
import random

import pytest

from handoff_client import Client, assert_clean
from handoff_workload import Ask, References, Tokens, served
from pd_launcher import Mode, Pair

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(900, func_only=True),
]

REQUESTS = 1000
AT_ONCE = 16
HANG_UPS = 0.3


async def test_coming_and_going(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    rng = random.Random(mode)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one() -> tuple[Ask, Tokens] | None:
        ask = rng.choice(served())
        patience = rng.uniform(0, 1) if rng.random() < HANG_UPS else None
        async with turns:
            try:
                async with asyncio.timeout(patience):
                    return ask, await client.answer(pair.router, ask)
            except TimeoutError:
                return None

    answers = await asyncio.gather(*(one() for _ in range(REQUESTS)))

    whole = [answer for answer in answers if answer is not None]
    print(f"{mode}: {len(whole)} answers, {REQUESTS - len(whole)} clients hung up")
    assert references.problems(whole) == []
    await assert_clean(client, pair)
