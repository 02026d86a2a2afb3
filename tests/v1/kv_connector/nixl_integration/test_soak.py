# SPDX-License-Identifier: Apache-2.0
"""A short soak: random faults for two minutes leave nothing wrong behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from handoff_engines import EngineRoom

SOAK = Path(__file__).resolve().parents[4] / "benchmarks" / "disagg" / "soak.py"
SECONDS = 120
# Each mode starts a pair, and each death of an engine costs a start.
TIMEOUT_S = 600
SUMMARY = re.compile(
    r"requests=(\d+) untouched_ok=(\d+)/(\d+) faults=(\d+) by_kind=\S+ "
    r"wrong=0 lost=0 hung=0 leaked=0 engine_deaths=0"
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(TIMEOUT_S + 60)]


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
