# SPDX-License-Identifier: Apache-2.0
"""Our connector as the child of one that holds several, and layers in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handoff_client import Client, assert_clean, handoffs
from handoff_engines import LAYER_GROUPS, EngineRoom
from handoff_workload import Ask, References, fresh
from pd_launcher import Mode

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


@pytest.mark.parametrize("mode", ["push"])
async def test_many_requests(
    room: EngineRoom, references: References, client: Client, mode: Mode
) -> None:
    pair = room.pair(mode, f"{mode}-prefill-multi", f"{mode}-decode-multi")
    asks = [
        replace(Ask(prompt), stream=bool(number % 3))
        for number, prompt in enumerate(fresh("multi"))
    ]

    answers = await client.answers(pair.router, asks, at_once=8)

    assert references.problems(answers) == []
    # P hears of what D has received in a later step.
    await assert_clean(client, pair)
    received = [r for r in await handoffs(pair.decode) if r["outcome"] == "received"]
    assert len(received) == sum(len(ask.prompt) > 1 for ask in asks)
    # Each step that computes a part of a prompt moves it in groups of layers.
    sent = [r for r in await handoffs(pair.prefill) if r["outcome"] == "served"]
    assert len(sent) == len(received)
    for record in sent:
        assert record["chunks"] >= LAYER_GROUPS, record
