# SPDX-License-Identifier: Apache-2.0
"""Engines and a router for the router tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import pd_router.side_channel
from conversation_backends import Talk
from router_backends import Cluster


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Engines and a router on loopback, all stopped at the end."""
    running = Cluster()
    try:
        yield running
    finally:
        await running.stop()


@pytest_asyncio.fixture
async def talk(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Talk]:
    """All on loopback, and all stopped at the end."""
    # A busy machine may keep a side channel waiting for longer than a client would.
    monkeypatch.setattr(pd_router.side_channel, "ANSWER_SECONDS", 10.0)
    talking = Talk(cluster)
    try:
        yield talking
    finally:
        talking.close()
