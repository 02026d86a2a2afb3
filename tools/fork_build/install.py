# SPDX-License-Identifier: Apache-2.0
"""Makes the virtual environment with the fork installed editable; quick when done."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.native import is_current, problem_of
from fork_build.pins import PIN_FILE
from fork_build.prepare import TORCH_HINT, Build

STATE_FILE = ".fork-install.json"
# pip's own wordings, with and without a constraints file that names torch.
_TORCH_MISSING = re.compile(r"(?:ERROR:.*|depends on|requested)\s+torch==")


def install(build: Build, environment: Path, extras: Iterable[str]) -> bool:
    """Install the fork with `extras` into the virtual environment, if not yet done.

    Returns:
        Whether anything had to be done.

    Raises:
        BuildError: the environment could not be made, or pip failed.
    """
    python = make_environment(environment)
    # The system's Python may come without pip; the environment's does not.
    laid = replace(build, python=python).lay()
    state_file = environment / STATE_FILE
    wanted_extras = set(extras)
    inputs = _inputs(build)
    if present := _installed_extras(state_file, inputs):
        if wanted_extras <= present and is_current(build.root):
            return laid
        wanted_extras |= present
    state_file.unlink(missing_ok=True)
    requirement = f"{build.root}[{','.join(sorted(wanted_extras))}]"
    run_pip([str(python), "-m", "pip"], ["install", "--editable", requirement])
    # pip shows nothing that a build says which succeeds.
    if problem := problem_of(build.root):
        print(problem, file=sys.stderr)
    state_file.write_text(
        json.dumps({"inputs": inputs, "extras": sorted(wanted_extras)}),
        encoding="utf-8",
    )
    return True


def make_environment(environment: Path) -> Path:
    """Make the virtual environment unless it works; return its Python."""
    python = environment / "bin" / "python"
    if not _works(python):
        print(f"making {environment} with {sys.executable}", file=sys.stderr)
        # An environment whose interpreter has gone is of no use to anybody.
        clear = python.is_symlink() or python.exists()
        try:
            venv.create(environment, with_pip=True, clear=clear)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(
                f"cannot make the virtual environment {environment}: {error}. Debian "
                "and Ubuntu have the venv module in the package python3-venv"
            ) from error
    return python


def run_pip(pip: Sequence[str], arguments: Sequence[str]) -> None:
    """Run pip, showing its output.

    Raises:
        BuildError: pip failed; where torch was what it missed, the text says how to
            get it.
    """
    torch_missing = False
    with subprocess.Popen(
        [*pip, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            torch_missing = torch_missing or bool(_TORCH_MISSING.search(line))
    if process.returncode == 0:
        return
    message = f"pip failed (exit status {process.returncode}); its reason is above"
    if torch_missing:
        message += f". {TORCH_HINT}"
    raise BuildError(message)


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    code = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def _inputs(build: Build) -> str:
    """A digest of all that decides what pip would install.

    Settings of linters and tests, in the same file, do not.
    """
    settings = tomllib.loads(
        (build.root / "pyproject.toml").read_text(encoding="utf-8")
    )
    parts = [
        (build.root / "setup.py").read_text(encoding="utf-8"),
        (build.root / PIN_FILE).read_text(encoding="utf-8"),
        settings["build-system"],
        settings["project"],
        settings["tool"]["fork-build"],
        build.target.name,
        str(build.root),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _installed_extras(path: Path, inputs: str) -> set[str]:
    """Extras that an install from the same inputs brought; empty where none did."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return set(state["extras"]) if state["inputs"] == inputs else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()
