# SPDX-License-Identifier: Apache-2.0
"""Lays our files over another version's sources, and has pytest import our tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fork_build.errors import BuildError
from rebase_check.collected import VARIABLE

SECONDS = 900.0
NO_TESTS = 5
"""pytest's exit status when it has collected nothing."""


@dataclass(frozen=True)
class Collected:
    """Which of our tests import.

    Attributes:
        tests: how many were found.
        failed: the reason of each file that does not import.
    """

    tests: int
    failed: dict[str, str]


def lay_ours(root: Path, files: Iterable[str], own: Iterable[str], tree: Path) -> None:
    """Put our files into an unpacked tree of the base.

    Args:
        root: of our checkout.
        files: of ours, relative to it.
        own: folders that we own in the base, which go first.
        tree: the unpacked sources.
    """
    for folder in own:
        shutil.rmtree(tree / folder, ignore_errors=True)
    # The base's tests would be collected, too, and have needs of their own.
    shutil.rmtree(tree / "tests", ignore_errors=True)
    for name in files:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target)
    # Compiled parts are not in the sources; those of the pinned base have to do.
    for library in (root / "vllm").rglob("*.so"):
        target = tree / library.relative_to(root)
        if target.parent.is_dir() and not target.exists():
            shutil.copy2(library, target)


def collect(tree: Path, tests: str, python: Path, report: Path) -> Collected:
    """Let pytest import the tests of a laid tree, and run none.

    Args:
        tree: as `lay_ours` left it.
        tests: the folder to look in.
        python: an interpreter with the tests' requirements.
        report: a file to be written.

    Raises:
        BuildError: pytest itself failed or took too long.
    """
    path = os.pathsep.join([str(tree), str(Path(__file__).resolve().parents[1])])
    command = [str(python), "-m", "pytest", "--collect-only", "--quiet"]
    command += ["-p", "rebase_check.collected", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "-m", "full or not full", tests]
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        VARIABLE: str(report),
    }
    try:
        outcome = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"pytest did not import the tests within {SECONDS:.0f} s"
        ) from error
    failed = {}
    if report.exists():
        lines = report.read_text(encoding="utf-8").splitlines()
        failed = dict(json.loads(line) for line in lines)
    if outcome.returncode not in (0, NO_TESTS) and not failed:
        raise BuildError(
            f"pytest failed (exit status {outcome.returncode}):\n"
            f"{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}"
        )
    found = sum("::" in line for line in outcome.stdout.splitlines())
    return Collected(found, failed)


def this_python() -> Path:
    """The running interpreter, not what it is a link to."""
    return Path(sys.executable)
