# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that notes which files could not be collected, and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "REBASE_CHECK_REPORT"
"""Names the file that gets a line of JSON for each file of tests that fails."""


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a failure with the last line of its reason."""
    if not report.failed:
        return
    lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
    reason = next(
        (line[1:].strip() for line in reversed(lines) if line.startswith("E ")),
        lines[-1] if lines else "no reason given",
    )
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, reason]) + "\n")
