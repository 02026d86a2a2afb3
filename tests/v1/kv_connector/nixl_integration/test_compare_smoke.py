# SPDX-License-Identifier: Apache-2.0
"""The shortest comparison: one pair of ours, one load, and all of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compare_base
from compare_loads import ANSWER_TOKENS
from handoff_engines import EngineRoom
from multiturn_engines import BENCH_SPEC, BLOCK_SIZE

TIMEOUT_S = 240
REQUESTS, PROMPT_TOKENS = 4, 128
# Keys and values of all layers as float32.
TOKEN_BYTES = 2 * 4 * BENCH_SPEC.layers * BENCH_SPEC.kv_heads * BENCH_SPEC.head_dim


@pytest.mark.distributed
@pytest.mark.timeout(TIMEOUT_S + 60, func_only=True)
def test_quick_run(room: EngineRoom, tmp_path: Path) -> None:
    room.close()
    command = [sys.executable, compare_base.__file__, "--quick", "--no-lock"]
    command += ["--output", str(tmp_path), "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)

    (path,) = tmp_path.glob("our-push_*.json")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert result["errors"] == []
    assert len(result["samples"]) == REQUESTS
    for sample in result["samples"]:
        assert sample["prompt_tokens"] == PROMPT_TOKENS
        assert sample["moved_tokens"] in (PROMPT_TOKENS - 1, PROMPT_TOKENS)
        assert len(sample["answer"]) == ANSWER_TOKENS
        assert sample["prefill"] > 0
        assert sample["first_step"] > 0
        # The KV can be at D before P's scheduler hears that the prefill has ended.
        assert 0 < sample["prefill"] + sample["handoff"] < sample["ttft"]
    _moved_everything(result["counted"])
    assert result["blocks_left"] == 0
    # Each request holds its blocks for some time.
    blocks = PROMPT_TOKENS // BLOCK_SIZE
    assert result["block_seconds"] > REQUESTS * blocks * 0.001
    for role in ("prefill", "decode"):
        assert result["hook_steps"][role] > 0
        assert 0 < result["forward_hooks"][role] < result["seconds"]
        assert 0 < result["forward_threads"][role] <= result["cpu"][role]
    assert "| our-push |" in (tmp_path / "table.md").read_text(encoding="utf-8")


def _moved_everything(counted: dict[str, dict[str, float]]) -> None:
    prefill, decode = counted["prefill"], counted["decode"]
    assert prefill["bytes"] + decode["bytes"] == REQUESTS * PROMPT_TOKENS * TOKEN_BYTES
    assert prefill["transfers"] + decode["transfers"] >= REQUESTS
    assert prefill["failed_transfers"] == decode["failed_transfers"] == 0
    assert decode["external_hits"] >= REQUESTS * (PROMPT_TOKENS - 1)
    assert decode["prefix_hits"] == prefill["prefix_hits"] == 0
