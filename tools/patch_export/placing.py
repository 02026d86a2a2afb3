# SPDX-License-Identifier: Apache-2.0
"""Gives each file its commit, and checks that no commit needs a later one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patch_export.errors import ExportError
from patch_export.imports import imported_files
from patch_export.table import TABLE_FILE, Table, matches, matching

_FIRST = 1
"""The commit before it only removes."""


@dataclass(frozen=True)
class Placing:
    """Where each file goes.

    Attributes:
        commits: index of the commit of each file that is exported.
        fork: why each other file stays here.
    """

    commits: Mapping[str, int]
    fork: Mapping[str, str]

    def of_commit(self, index: int) -> list[str]:
        """The files of one commit, sorted."""
        return sorted(path for path, place in self.commits.items() if place == index)


def place(table: Table, sources: Mapping[str, str]) -> Placing:
    """Place every tracked file exactly once.

    Args:
        table: the table of the series.
        sources: text of each tracked file; of others than Python it is not looked at.

    Raises:
        ExportError: files without a place or with two, entries of the table that fit
            no file, or an import of what comes later; all problems are named at once.
    """
    problems = _unused(table, sources)
    commits: dict[str, int] = {}
    fork: dict[str, str] = {}
    by_imports: list[str] = []
    for path in sources:
        reasons = matching(table.fork, path)
        places = [
            index
            for index, commit in enumerate(table.commits)
            if matching(commit.files, path)
        ]
        if reasons:
            fork[path] = table.fork[reasons[0]]
        elif len(places) > 1:
            keys = " and ".join(repr(table.commits[index].key) for index in places)
            problems.append(f"{path} has more than one place: commits {keys}")
        elif places:
            commits[path] = places[0]
        elif matching(table.tests, path):
            by_imports.append(path)
        else:
            problems.append(
                f"{path} has no place: add it to a commit's `files` or `modules`, or "
                "to [fork] with the reason why it stays here"
            )
    needs = _Needs(table, sources, commits, fork)
    earliest = {path: needs.place_of(path) for path in by_imports}
    commits.update(_with_users(table, sources, commits, earliest))
    problems += needs.problems
    problems += _too_early(table, sources, commits)
    if problems:
        raise ExportError(
            f"tools/patch_export/{TABLE_FILE.name} does not fit the repository:\n  "
            + "\n  ".join(sorted(set(problems)))
        )
    return Placing(commits, fork)


class _Needs:
    """Places tests as early as their imports allow."""

    def __init__(
        self,
        table: Table,
        sources: Mapping[str, str],
        commits: Mapping[str, int],
        fork: Mapping[str, str],
    ) -> None:
        self.problems: list[str] = []
        self._table = table
        self._sources = sources
        self._fixed = commits
        self._fork = fork
        self._found: dict[str, int] = {}

    def place_of(self, path: str) -> int:
        if path in self._fixed:
            return self._fixed[path]
        if path in self._found:
            return self._found[path]
        # While its imports are looked at: a circle adds nothing.
        self._found[path] = _FIRST
        latest = _FIRST
        for pattern, key in self._table.after.items():
            if matches(pattern, path):
                latest = max(latest, self._table.index(key))
        for needed in _imports(self._table, self._sources, path):
            if needed in self._fork:
                self.problems.append(
                    f"{path} imports {needed}, which stays in the fork: list it under "
                    "[fork], too, or move what it needs"
                )
                continue
            latest = max(latest, self.place_of(needed))
        self._found[path] = latest
        return latest


def _with_users(
    table: Table,
    sources: Mapping[str, str],
    commits: Mapping[str, int],
    earliest: Mapping[str, int],
) -> dict[str, int]:
    """Move what only helps tests to the first commit that has a use for it."""
    users: dict[str, set[str]] = {}
    for path in (*commits, *earliest):
        for needed in _imports(table, sources, path):
            users.setdefault(needed, set()).add(path)
    places = {**commits, **earliest}
    helpers = [path for path in earliest if "/test_" not in path and path in users]
    changed = True
    while changed:
        changed = False
        for path in helpers:
            first = min(places[user] for user in users[path])
            changed = changed or first > places[path]
            places[path] = max(first, places[path])
    return {path: places[path] for path in earliest}


def _imports(table: Table, sources: Mapping[str, str], path: str) -> Sequence[str]:
    if not path.endswith(".py"):
        return ()
    files, renames = sources.keys(), table.renames
    return sorted(imported_files(sources[path], path, files, table.roots, renames))


def _too_early(
    table: Table, sources: Mapping[str, str], commits: Mapping[str, int]
) -> list[str]:
    problems = []
    early = {path for commit in table.commits for path in commit.early}
    for path, index in commits.items():
        for needed in _imports(table, sources, path):
            if needed in early:
                continue
            place_needed = commits.get(needed)
            if place_needed is None:
                problems.append(f"{path} imports {needed}, which is not exported")
            elif place_needed > index:
                problems.append(
                    f"{path} of commit {table.commits[index].key!r} imports {needed} "
                    f"of the later commit {table.commits[place_needed].key!r}"
                )
    return problems


def _unused(table: Table, sources: Mapping[str, str]) -> list[str]:
    entries = [*table.fork, *table.after, *table.renames]
    entries += [path for commit in table.commits for path in commit.files]
    entries += [path for commit in table.commits for path in commit.early]
    return [
        f"the entry {entry!r} fits no tracked file"
        for entry in entries
        if not any(matches(entry, path) for path in sources)
    ]
