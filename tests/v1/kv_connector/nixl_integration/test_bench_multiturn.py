# SPDX-License-Identifier: Apache-2.0
"""A short multi-turn benchmark: what it writes down is complete and consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import multiturn
from handoff_engines import SPEC, EngineRoom
from multiturn_records import Run, Turn, load_runs
from multiturn_stats import differing_conversations
from pd_launcher import Mode
from tiny_model import tiny_model

TIMEOUT_S = 240
CONVERSATIONS, TURNS = 2, 3
FIRST, SAID, ANSWER = 150, 40, 12
BLOCK_SIZE = 32


def _bench(mode: Mode, folder: Path) -> list[Run]:
    command = [sys.executable, multiturn.__file__, "--modes", mode]
    command += ["--p-prefix-caching", "off", "--repetitions", "1"]
    command += ["--conversations", str(CONVERSATIONS), "--turns", str(TURNS)]
    command += ["--first-tokens", str(FIRST), "--user-tokens", str(SAID)]
    command += ["--answer-tokens", str(ANSWER), "--think", "0.1"]
    command += ["--model-path", str(tiny_model(SPEC)), "--no-lock"]
    command += ["--output", str(folder), "--log-dir", str(folder / "logs")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return load_runs(folder)


@pytest.mark.distributed
@pytest.mark.timeout(TIMEOUT_S + 60, func_only=True)
@pytest.mark.parametrize(
    "bench_mode", ["push", pytest.param("pull", marks=pytest.mark.full)]
)
def test_short_run(room: EngineRoom, tmp_path: Path, bench_mode: Mode) -> None:
    room.close()

    runs = {run.setting.bidirectional: run for run in _bench(bench_mode, tmp_path)}

    assert set(runs) == {False, True}
    for reading, run in runs.items():
        assert run.errors == []
        assert len(run.turns) == CONVERSATIONS * TURNS
        for turn in run.turns:
            _is_complete(turn)
            if not reading or turn.turn == 1:
                assert (turn.tokens_read, turn.read_outcome) == (0, "not asked")
                assert turn.tokens_computed == turn.prompt_tokens
                continue
            # All that D keeps is read but for its last, unfinished block.
            assert turn.read_outcome == "read"
            assert turn.tokens_read
            assert turn.tokens_computed is not None
            assert turn.tokens_computed <= turn.new_tokens + BLOCK_SIZE
        assert run.reader_tokens == sum(turn.tokens_read or 0 for turn in run.turns)
    assert differing_conversations(runs.values()) == (0, CONVERSATIONS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [one["repetitions"] for one in summary["settings"]] == [1, 1]
    assert [one["mode"] for one in summary["gains"]] == [bench_mode]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.md").read_text().count(f"| {bench_mode} |") == 4


def _is_complete(turn: Turn) -> None:
    missing = [f.name for f in fields(turn) if getattr(turn, f.name) is None]
    assert missing == []
    assert turn.prompt_tokens == FIRST + (turn.turn - 1) * (SAID + ANSWER)
    assert turn.new_tokens == (FIRST if turn.turn == 1 else SAID)
    assert len(turn.answer) == ANSWER
    assert turn.tokens_computed is not None
    assert turn.tokens_cached is not None
    assert turn.tokens_read is not None
    told = turn.tokens_computed + turn.tokens_cached + turn.tokens_read
    assert told == turn.prompt_tokens
    assert 0 < turn.ttft < turn.total
    assert turn.prefill is not None
    assert turn.compute is not None
    assert turn.transfer is not None
    assert (turn.transfer > 0) is (turn.tokens_read > 0)
    assert turn.compute > 0
    assert turn.transfer + turn.compute < turn.prefill
