# SPDX-License-Identifier: Apache-2.0
"""Which files of the checkout are ours."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.native import PRODUCT
from fork_build.overlay import edited_files, read_stamp
from fork_build.pins import Pins

_DERIVED_FOLDERS = {"__pycache__"}
_DERIVED_SUFFIXES = {".pyc", ".pyo"}


def own_files(root: Path, pins: Pins) -> list[str]:
    """Files at our paths inside the distribution, sorted.

    Raises:
        BuildError: one of our paths is missing.
    """
    found: list[str] = []
    for own in pins.own_paths:
        path = root / own
        if path.is_file():
            found.append(own)
        elif path.is_dir():
            found.extend(_walk(root, path))
        else:
            raise BuildError(
                f"{path} is listed in `own_paths` of tools/fork_build/base.toml but "
                "does not exist; restore it (git checkout) or take it off the list"
            )
    return sorted(found)


def git_files(root: Path, *arguments: str) -> list[str]:
    """Files that `git ls-files` lists, present in the working tree, sorted.

    Raises:
        BuildError: git is missing or the folder is no git checkout.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", *arguments]
    try:
        outcome = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise BuildError("git is needed here; install it") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()
        raise BuildError(f"{root} is no usable git checkout: {reason}") from error
    names = {name for name in outcome.stdout.decode().split("\0") if name}
    return sorted(name for name in names if (root / name).is_file())


def distribution_files(root: Path) -> list[str]:
    """What an sdist holds: all that git tracks or would track."""
    return git_files(root, "--cached", "--others", "--exclude-standard")


def stray_files(root: Path) -> list[str]:
    """Problems with files under `vllm/`, one line each; empty where there are none.

    A file that git ignores and that the build did not lay would be lost unnoticed; so
    would an edit of a file that the build laid.

    Raises:
        BuildError: the base is not laid, so that nothing can be told apart.
    """
    stamp = read_stamp(root)
    if stamp is None:
        raise BuildError("the base is not laid; run `make install` first")
    visible = set(distribution_files(root))
    problems = [
        f"{name}: neither part of the base nor visible to git"
        for name in _walk(root, root / "vllm")
        if name not in stamp.files and name not in visible
    ]
    problems += [
        f"{name}: part of the base, edited in place"
        for name in edited_files(root, stamp.files)
        if name not in visible
    ]
    return sorted(problems)


def _walk(root: Path, folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.suffix in _DERIVED_SUFFIXES or _DERIVED_FOLDERS & set(path.parts):
            continue
        name = path.relative_to(root)
        if name != PRODUCT and (path.is_file() or path.is_symlink()):
            yield name.as_posix()
