# SPDX-License-Identifier: Apache-2.0
"""The table of the series: which file belongs to which commit, and which stays here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from patch_export.errors import ExportError

TABLE_FILE = Path(__file__).with_name("series.toml")


@dataclass(frozen=True)
class Edit:
    """How a file of upstream's looks from a commit on; all is derived from its base.

    Attributes:
        path: of the file.
        trim: drop the functions that use what the series removes.
        keep: names of the package that these may use all the same.
        unregister: connectors whose registration is dropped.
        substitute: pairs of pattern and replacement; each pattern must occur.
    """

    path: str
    trim: bool = False
    keep: tuple[str, ...] = ()
    unregister: tuple[str, ...] = ()
    substitute: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Commit:
    """One commit of the series."""

    key: str
    title: str
    body: str
    files: tuple[str, ...]
    removes: tuple[str, ...]
    edits: tuple[Edit, ...]
    early: tuple[str, ...] = ()
    """Files of a later commit that are laid here with their docstring only."""


@dataclass(frozen=True)
class Table:
    """The whole table.

    Attributes:
        package: folder of the connectors.
        roots: folders from which modules are imported, in order.
        tests: patterns of files that are placed by what they import.
        after: tests that read files, and the commit that they wait for.
        fork: patterns of files that stay in the fork, and why.
        renames: new paths of files that have too general a name in upstream's tree.
        commits: in order.
    """

    package: str
    roots: tuple[str, ...]
    tests: tuple[str, ...]
    after: Mapping[str, str]
    fork: Mapping[str, str]
    renames: Mapping[str, str]
    commits: tuple[Commit, ...]

    def index(self, key: str) -> int:
        """Position of a commit."""
        for number, commit in enumerate(self.commits):
            if commit.key == key:
                return number
        known = ", ".join(commit.key for commit in self.commits)
        raise ExportError(f"{TABLE_FILE.name}: no commit {key!r}; there are: {known}")


def load_table(path: Path = TABLE_FILE) -> Table:
    """Read the table.

    Raises:
        ExportError: a key is missing or of the wrong kind.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        package = data["package"]
        return Table(
            package=package,
            roots=tuple(data["roots"]),
            tests=tuple(data["tests"]),
            after=data["after"],
            fork=data["fork"],
            renames=data["renames"],
            commits=tuple(_commit(package, table) for table in data["commits"]),
        )
    except (KeyError, TypeError) as error:
        raise ExportError(f"{path}: missing or malformed key {error}") from error


def _commit(package: str, table: Mapping[str, Any]) -> Commit:
    modules = [f"{package}/{name}" for name in table.get("modules", ())]
    return Commit(
        key=table["key"],
        title=table["title"],
        body=table["body"].strip(),
        files=(*modules, *table.get("files", ())),
        removes=tuple(table.get("removes", ())),
        edits=tuple(_edit(edit) for edit in table.get("edits", ())),
        early=tuple(f"{package}/{name}" for name in table.get("early", ())),
    )


def _edit(table: Mapping[str, Any]) -> Edit:
    return Edit(
        path=table["path"],
        trim=table.get("trim", False),
        keep=tuple(table.get("keep", ())),
        unregister=tuple(table.get("unregister", ())),
        substitute=tuple((old, new) for old, new in table.get("substitute", ())),
    )


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    wild = {"**": ".*", "*": "[^/]*"}
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts))


def matches(pattern: str, path: str) -> bool:
    """Whether a path fits; `*` stays within a folder, `**` does not."""
    return _compiled(pattern).fullmatch(path) is not None


def matching(patterns: Iterable[str], path: str) -> list[str]:
    """The patterns that a path fits."""
    return [pattern for pattern in patterns if matches(pattern, path)]
