# SPDX-License-Identifier: Apache-2.0
"""Engines and a router for the router tests."""

from collections.abc import AsyncIterator

import pytest_asyncio

from router_backends import Cluster


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Engines and a router on loopback, all stopped at the end."""
    running = Cluster()
    try:
        yield running
    finally:
        await running.stop()
