# SPDX-License-Identifier: Apache-2.0
"""Which of our files a Python file imports, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath


@cache
def imported_names(source: str, path: str) -> frozenset[str]:
    """Dotted names that a file imports anywhere, those of `from` with the name added.

    Args:
        source: its text.
        path: POSIX path, from which relative imports are counted.
    """
    names: set[str] = set()
    folder = PurePosixPath(path).parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                module = [*folder[: len(folder) - node.level + 1], *module]
            start = ".".join(module)
            names.update(f"{start}.{alias.name}" for alias in node.names)
    return frozenset(names)


def resolve(name: str, files: Collection[str], roots: Sequence[str]) -> str | None:
    """The file that holds a dotted name, or None where none of `files` does.

    Args:
        name: of a module, or of something in one.
        files: POSIX paths.
        roots: folders from which modules are imported; empty is the repository's.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for root in roots:
            stem = "/".join([*([root] if root else []), *parts[:length]])
            for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
                if candidate in files:
                    return candidate
    return None


def imported_files(
    source: str,
    path: str,
    files: Collection[str],
    roots: Sequence[str],
    renames: Mapping[str, str],
) -> set[str]:
    """Which of `files` a file imports; a test also needs its folders' `conftest.py`.

    Args:
        source: its text.
        path: where it is.
        files: POSIX paths.
        roots: folders from which modules are imported.
        renames: new places of some of `files`; a `conftest.py` counts there.
    """
    found = {
        resolve(name, files, roots) for name in imported_names(source, path)
    } | set(_conftests(path, files, renames))
    return {name for name in found if name is not None and name != path}


def _conftests(
    path: str, files: Collection[str], renames: Mapping[str, str]
) -> Iterator[str]:
    if not PurePosixPath(path).name.startswith("test_"):
        return
    moved = {new: old for old, new in renames.items()}
    for folder in PurePosixPath(path).parents:
        place = (folder / "conftest.py").as_posix()
        candidate = moved.get(place, place)
        here = renames.get(candidate, candidate) == place
        if here and candidate in files and len(folder.parts) > 1:
            yield candidate
