# SPDX-License-Identifier: Apache-2.0
"""Engines that have nothing to do, do nothing."""

from __future__ import annotations

import pytest

from handoff_client import Client, assert_clean
from handoff_cpu import LIMIT, idle_workers
from handoff_workload import Ask, References, fresh
from pd_launcher import Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


async def test_idle_cpu(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    """A measurement with an agreed limit: no thread of ours spins."""
    prompt = fresh("idle")[0]
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)
    await assert_clean(client, pair)

    workers = await idle_workers(pair.prefill, pair.decode)

    assert len(workers) == 2
    assert max(workers) < LIMIT
