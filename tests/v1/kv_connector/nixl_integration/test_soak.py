# SPDX-License-Identifier: Apache-2.0
"""A short soak: random faults for two minutes leave nothing wrong behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import soak_tally
from handoff_engines import EngineRoom

SOAK = Path(__file__).resolve().parents[4] / "benchmarks" / "disagg" / "soak.py"
SECONDS = 120
# Each mode starts a pair, and each death of an engine costs a start.
TIMEOUT_S = 900
SUMMARY = re.compile(
    r"requests=(\d+) untouched_ok=(\d+)/(\d+) faults=(\d+) by_kind=\S+ "
    r"wrong=0 lost=0 hung=0 leaked=0 engine_deaths=0"
)


def test_shortcomings() -> None:
    def tally(**counts: int) -> Any:
        faults = Counter(dict.fromkeys(soak_tally.fault_kinds(), 2))
        made: dict[str, Any] = {
            "requests": 100,
            "untouched": 50,
            "untouched_ok": 50,
            "reads": 5,
        }
        made.update(counts)
        return soak_tally.Tally(faults=faults, **made)

    assert tally().shortcomings(60.0) == []
    assert tally(untouched_ok=49).shortcomings(60.0)
    assert tally(requests=10).shortcomings(60.0)
    assert tally(reads=0).shortcomings(60.0) == ["no earlier turn was read back"]
    assert tally().shortcomings(600.0)
    for kind in ("wrong", "lost", "hung", "leaked", "engine_deaths"):
        assert tally(**{kind: 1}).shortcomings(60.0) == [f"{kind} is 1"]
    missing = tally()
    del missing.faults["kill"]
    assert missing.shortcomings(60.0) == ["no kill happened"]


@pytest.mark.distributed
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_two_minutes(room: EngineRoom, tmp_path: Path) -> None:
    room.close()
    command = [sys.executable, str(SOAK), "--duration", str(SECONDS)]
    command += ["--no-lock", "--log-dir", str(tmp_path)]

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = SUMMARY.fullmatch(done.stdout.splitlines()[-1])
    assert summary is not None, done.stdout
    requests, succeeded, untouched, faults = map(int, summary.groups())
    assert succeeded == untouched > 0
    assert requests > untouched
    assert faults > 0
