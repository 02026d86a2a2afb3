# SPDX-License-Identifier: Apache-2.0
"""Makes the commits of the series and puts them on a branch of upstream's tree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fork_build.checkout import distribution_files
from fork_build.pins import load_pins
from patch_export import adapt
from patch_export.placing import Placing, place
from patch_export.table import Commit, Table, load_table, matching
from patch_export.target import Change, Identity, Target
from patch_export.tidy import tidied, without_unused_imports
from patch_export.upstream import edited

_MODE = "100644"
_EXECUTABLE = "100755"
SINGLE_TITLE = "[KVConnector][NIXL] Hand KV over by push and by pull, with one thread"


def own_sources(root: Path) -> dict[str, str]:
    """Text of each file of ours, by path; empty if it is not Python nor a page."""
    return {
        path: (root / path).read_text(encoding="utf-8")
        if path.endswith((".py", ".md"))
        else ""
        for path in distribution_files(root)
    }


def lay(
    root: Path, target: Target, branch: str, series: bool, identity: Identity
) -> int:
    """Put our files onto a branch of the target; return how many commits it has.

    Args:
        root: of our checkout.
        target: upstream's tree.
        branch: a name that is not there yet.
        series: a commit per part; otherwise one.
        identity: who signs off.

    Raises:
        ExportError: upstream's tree is not the base's, or not as expected; a file of
            ours has no place in the series.
    """
    base = load_pins(root).version
    target.refuse_unless_base(base)
    target.refuse_unfit(branch)
    table = load_table()
    export = Export(root, table, place(table, own_sources(root)))
    target.make_checkout(identity, base)
    changes = export.changes(target, identity)
    if not series:
        changes = [export.joined(changes, target, identity)]
    target.add_branch(branch, changes, identity)
    return len(changes)


@dataclass(frozen=True)
class Export:
    """What is exported, and how it is placed."""

    root: Path
    table: Table
    placing: Placing

    def changes(self, target: Target, identity: Identity) -> list[Change]:
        """The commits of the series."""
        theirs = target.files()
        ours = self._adapted(target.text("pyproject.toml"), theirs)
        removed = self._removed(theirs)
        gone = [_module(path) for paths in removed for path in paths]
        known = set(theirs)
        changes = []
        for index, commit in enumerate(self.table.commits):
            files: dict[str, tuple[str, bytes] | None] = dict.fromkeys(removed[index])
            files |= self._edits(commit, target, [name for name in gone if name])
            new = {
                self.table.renames.get(path, path): ours[path]
                for path in self.placing.of_commit(index)
            }
            for path in commit.early:
                mode, data = ours[path]
                text = adapt.docstring_only(data.decode())
                new[path] = (mode, text.encode())
            files |= new
            files |= self._beside_tests(new, known)
            known |= set(files)
            changes.append(Change(_message(commit, identity), files))
        return changes

    def _adapted(
        self, settings: str, theirs: Iterable[str]
    ) -> dict[str, tuple[str, bytes]]:
        executable = _executable_files(self.root)
        texts: dict[str, str] = {}
        found: dict[str, tuple[str, bytes]] = {}
        for path in self.placing.commits:
            data = (self.root / path).read_bytes()
            found[path] = (_EXECUTABLE if path in executable else _MODE, data)
            if path.endswith((".py", ".md", ".sh", ".json")):
                texts[path] = data.decode()
        renames = self.table.renames
        for path, text in texts.items():
            if path.endswith(".md"):
                exported = self.placing.commits.keys()
                text = adapt.page(text, path, exported, renames)
            if path.endswith(".py"):
                text = adapt.python_file(text, path)
            texts[path] = adapt.renamed_mentions(text, renames)
        python = {path: text for path, text in texts.items() if path.endswith(".py")}
        packages = {
            str(PurePosixPath(path).parent)
            for path in (*theirs, *map(_package_of_test, python))
            if path.endswith("/__init__.py")
        }
        texts |= tidied(python, settings, packages)
        return found | {
            path: (found[path][0], text.encode()) for path, text in texts.items()
        }

    def _removed(self, theirs: Iterable[str]) -> list[list[str]]:
        return [
            [path for path in theirs if matching(commit.removes, path)]
            for commit in self.table.commits
        ]

    def _edits(
        self, commit: Commit, target: Target, gone: list[str]
    ) -> dict[str, tuple[str, bytes]]:
        texts = {
            edit.path: edited(target.text(edit.path), edit, gone)
            for edit in commit.edits
        }
        trimmed = {edit.path: texts[edit.path] for edit in commit.edits if edit.trim}
        if trimmed:
            texts |= without_unused_imports(trimmed, target.text("pyproject.toml"))
        return {path: (_MODE, text.encode()) for path, text in texts.items()}

    def _beside_tests(
        self, new: Mapping[str, object], known: set[str]
    ) -> dict[str, tuple[str, bytes]]:
        """What pytest needs beside our tests and upstream's tree does not have."""
        made: dict[str, tuple[str, bytes]] = {}
        for path in new:
            if not (package := _package_of_test(path)):
                continue
            made[package] = (_MODE, b"")
            folders = [name for name in self.table.roots if name not in ("", "tests")]
            content = adapt.conftest(folders).encode()
            made[adapt.CONFTEST_PATH] = (_MODE, content)
        return {path: made[path] for path in made if path not in known}

    def joined(
        self, changes: list[Change], target: Target, identity: Identity
    ) -> Change:
        """All commits of the series as one."""
        theirs = target.files()
        files: dict[str, tuple[str, bytes] | None] = {}
        for change in changes:
            files |= change.files
        # What one commit removes and a later one brings back is neither.
        files = {
            path: content
            for path, content in files.items()
            if content is not None or path in theirs
        }
        titles = "".join(f"- {commit.title}\n" for commit in self.table.commits)
        message = f"{SINGLE_TITLE}\n\nIn one, of a series:\n\n{titles}"
        return Change(f"{message}\nSigned-off-by: {identity}\n", files)


def _message(commit: Commit, identity: Identity) -> str:
    return f"{commit.title}\n\n{commit.body}\n\nSigned-off-by: {identity}\n"


def _package_of_test(path: str) -> str:
    """The `__init__.py` that a test module needs in upstream's tree; "" for others."""
    if not path.startswith("tests/") or not path.endswith(".py"):
        return ""
    return f"{PurePosixPath(path).parent}/__init__.py"


def _module(path: str) -> str | None:
    if not path.endswith(".py"):
        return None
    stem = path.removesuffix(".py").removesuffix("/__init__")
    return stem.replace("/", ".")


def _executable_files(root: Path) -> set[str]:
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-s", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {
        entry.partition("\t")[2]
        for entry in listed.split("\0")
        if entry.startswith(_EXECUTABLE)
    }
