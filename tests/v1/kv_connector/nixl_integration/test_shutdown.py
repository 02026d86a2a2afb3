# SPDX-License-Identifier: Apache-2.0
"""A prefill engine that is asked to end while it holds KV for others."""

from __future__ import annotations

import asyncio
import random

import pytest

from handoff_client import (
    Client,
    completion,
    decode_params,
    handoffs,
    new_transfer_id,
    prefill_params,
)
from handoff_engines import SHUTDOWN_S, EngineRoom
from handoff_workload import Ask
from pd_launcher import Engine, Mode

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(600, func_only=True),
]

LATE_S = 6.0
"""The engine itself steps for two seconds more; then the workers wait alone."""


async def test_computed_kv_outlives_the_request_to_end(
    client: Client, room: EngineRoom, mode: Mode
) -> None:
    pair = room.pair(mode, f"{mode}-prefill-draining", f"{mode}-decode")
    rng = random.Random(mode)
    ask = Ask(tuple(rng.randrange(5, 200) for _ in range(300)))
    body = completion(ask)
    expected = (await client.post(pair.prefill, body)).tokens

    transfer_id = new_transfer_id()
    first = {
        **body,
        "max_tokens": 1,
        "kv_transfer_params": prefill_params(transfer_id),
    }
    prefill = await client.post(pair.prefill, first)
    assert prefill.status == 200, prefill
    pair.prefill.request_stop()
    await asyncio.sleep(LATE_S)

    params = decode_params(transfer_id, pair.prefill)
    if mode == "pull":
        params = {**prefill.body["kv_transfer_params"], "transfer_id": transfer_id}
    decode = await client.post(pair.decode, {**body, "kv_transfer_params": params})
    assert decode.tokens == expected
    (record,) = await handoffs(pair.decode, transfer_id)
    assert (record["outcome"], record["tokens"]) == ("received", len(ask.prompt))

    # All is taken, so nothing keeps it from ending by itself.
    await asyncio.wait_for(_ended(pair.prefill), SHUTDOWN_S)
    assert pair.prefill.returncode == 0


async def _ended(engine: Engine) -> None:
    while engine.running:
        await asyncio.sleep(0.1)
