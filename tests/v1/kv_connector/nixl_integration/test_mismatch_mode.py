# SPDX-License-Identifier: Apache-2.0
"""A push and a pull connector refuse each other, and say why."""

from __future__ import annotations

import pytest

from handoff_client import Client, assert_clean, completion
from handoff_engines import EngineRoom
from handoff_workload import Ask, References, fresh

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


async def test_push_and_pull(
    room: EngineRoom, references: References, client: Client
) -> None:
    pair = room.pair("push", "push-prefill", "pull-decode")
    prompt = fresh("foreign")[-1]

    reply = await client.post(pair.router, completion(Ask(prompt)))

    assert reply.status == 503, reply
    assert reply.body["error"]["retryable"] is True
    log = pair.decode.log_path.read_text()
    assert "connector_mode differs (local pull, remote push)" in log
    assert (await client.answer(pair.decode, Ask(prompt))) == references.expected(
        prompt
    )
    await assert_clean(client, pair)
