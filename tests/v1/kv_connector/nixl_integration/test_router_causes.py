# SPDX-License-Identifier: Apache-2.0
"""A client of a router is told why its hand-off failed, in the engine's words."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from handoff_client import Client, completion, handoffs
from handoff_engines import ROUTER_TIMEOUT_S
from handoff_workload import Ask, References, fresh
from pd_launcher import Mode, Pair, Router

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]


@pytest.mark.parametrize("mode", ["push"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_handoff_is_explained(
    client: Client,
    pair: Pair,
    mode: Mode,
    references: References,
    stream: bool,
    tmp_path: Path,
) -> None:
    # Where this router believes the prefill engine's side channel, nobody listens.
    astray = copy.copy(pair.prefill)
    astray.side_channel_port = 1
    router = Router("astray", mode, [astray], [pair.decode], tmp_path)
    prompt = fresh("after")[0]
    try:
        router.start()
        router.wait_ready(ROUTER_TIMEOUT_S)
        reply = await client.post(router, completion(Ask(prompt, stream=stream)))
    finally:
        router.stop()

    assert reply.status == 503, reply
    error = reply.body["error"]
    records = await handoffs(pair.decode, error["transfer_id"])
    (cause,) = [r["cause"] for r in records if r["outcome"] == "failed"]
    assert "127.0.0.1:1" in cause
    assert error["detail"] == f"decode engine: {cause}"
    assert error["retryable"] is True
    assert error["detail"] in router.log_path.read_text()
    # The other router knows better.
    right = await client.answer(pair.router, Ask(prompt, stream=stream))
    assert right == references.expected(prompt)
