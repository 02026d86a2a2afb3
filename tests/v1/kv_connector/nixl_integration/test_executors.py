# SPDX-License-Identifier: Apache-2.0
"""Engines whose worker is in the engine's own process hand off like the others."""

from __future__ import annotations

import random
import re

import pytest

from handoff_client import Client, assert_clean, completion, handoffs
from handoff_engines import SPEC, EngineRoom
from handoff_workload import Ask
from pd_launcher import Mode
from tiny_model import random_prompt

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.full,
    pytest.mark.timeout(300, func_only=True),
]

LENGTHS = (2, 33, 100, 513, 1300)
_FROM_THE_WORKER = re.compile(r"^\((\w+) pid=\d+\).*\[cpu_worker\.py", re.MULTILINE)
"""In a log, which process the worker's code runs in."""


@pytest.mark.parametrize("mode", ["push"])
async def test_in_process(room: EngineRoom, client: Client, mode: Mode) -> None:
    pair = room.pair(mode, f"{mode}-prefill-uni", f"{mode}-decode-uni")
    for engine in (pair.prefill, pair.decode):
        log = engine.log_path.read_text(encoding="utf-8", errors="replace")
        assert set(_FROM_THE_WORKER.findall(log)) == {"EngineCore"}
    rng = random.Random(f"executors {mode}")
    for length in LENGTHS:
        body = completion(Ask(tuple(random_prompt(length, rng, SPEC))))

        got = await client.post(pair.router, body)
        alone = await client.post(pair.prefill, body)

        assert got.tokens == alone.tokens
        assert (await handoffs(pair.decode))[-1]["outcome"] == "received"
    await assert_clean(client, pair)
