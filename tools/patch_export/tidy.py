# SPDX-License-Identifier: Apache-2.0
"""Sorts imports and formats as upstream's own settings want it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from patch_export.errors import ExportError


def tidied(
    files: Mapping[str, str], settings: str, packages: Collection[str]
) -> dict[str, str]:
    """Python files by path, formatted and with sorted imports.

    Args:
        files: their texts.
        settings: text of upstream's `pyproject.toml`.
        packages: the folders that have an `__init__.py` in upstream's tree. How a file
            imports its own package decides where that import is sorted to.
    """
    first_party = "lint.isort.known-first-party=['vllm', 'tests']"
    # D413, a blank line after a docstring's last section, is upstream's way, not ours.
    sort = ["check", "--fix", "--select=I,D413", "--config", first_party]
    return _run(files, settings, [sort, ["format"]], packages)


def without_unused_imports(files: Mapping[str, str], settings: str) -> dict[str, str]:
    """Python files by path, without imports that nothing uses."""
    return _run(files, settings, [["check", "--fix", "--select=F401"]])


def _run(
    files: Mapping[str, str],
    settings: str,
    commands: list[list[str]],
    packages: Collection[str] = (),
) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="patch-export-") as name:
        folder = Path(name)
        (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
        for path, text in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            for parent in PurePosixPath(path).parents:
                if str(parent) in packages:
                    (folder / parent / "__init__.py").touch()
        for command in commands:
            outcome = subprocess.run(
                [_ruff(), *command, "--no-cache", "--quiet", *files],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if outcome.returncode != 0:
                raise ExportError(
                    f"ruff {command[0]} failed on the exported files:\n"
                    f"{outcome.stdout}{outcome.stderr}"
                )
        return {path: (folder / path).read_text(encoding="utf-8") for path in files}


def _ruff() -> str:
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise ExportError(
            "ruff is needed to sort imports as upstream does: run `make install` and "
            "use .venv/bin/python"
        )
    return found
