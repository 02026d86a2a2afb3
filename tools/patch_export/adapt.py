# SPDX-License-Identifier: Apache-2.0
"""What our files look like in upstream's tree."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping

SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
COPYRIGHT = "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
CONFTEST_PATH = "tests/v1/kv_connector/conftest.py"
PACKAGE_INIT = ""

_TEST_IMPORT = re.compile(r"^(\s*(?:from|import) )(v1\.kv_connector\b)", re.MULTILINE)
_MARKER = "@pytest.mark.asyncio\n"
_ASYNC_TEST = re.compile(r"^([ \t]*)(async def test_)", re.MULTILINE)
_TWICE = re.compile(
    r"^([ \t]*@pytest\.mark\.asyncio\b.*\n(?:[ \t]*@.*\n)*)"
    r"[ \t]*@pytest\.mark\.asyncio\n",
    re.MULTILINE,
)
_IMPORT_PYTEST = re.compile(r"^import pytest$", re.MULTILINE)
_LINK = re.compile(
    r"(?<!!)\[(?P<text>[^]]*)\]\((?P<target>[^)\s#]+)(?P<part>#[^)]*)?\)"
)
_OTHER_MARKER = re.compile(r"\bpytest\.mark\.full\b")


def python_file(text: str, path: str) -> str:
    """A Python file: upstream's second header line, and its ways in tests."""
    text = text.replace(SPDX, SPDX + COPYRIGHT, 1)
    if not path.startswith("tests/"):
        return text
    text = _TEST_IMPORT.sub(r"\1tests.\2", text)
    # Upstream runs a test of this marker only when asked to.
    text = _OTHER_MARKER.sub("pytest.mark.optional", text)
    if _ASYNC_TEST.search(text):
        # Upstream's pytest-asyncio is in strict mode.
        text = _ASYNC_TEST.sub(rf"\1{_MARKER}\1\2", text)
        text = _TWICE.sub(r"\1", text)
        if not _IMPORT_PYTEST.search(text):
            text = _with_import(text, "import pytest\n")
    return text


def docstring_only(text: str) -> str:
    """A module's head up to the end of its docstring."""
    first = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[: first.end_lineno])


def page(
    text: str, path: str, exported: Collection[str], renames: Mapping[str, str]
) -> str:
    """A page of the documentation, with links that hold in upstream's tree.

    A link to a file that stays in the fork becomes its text.
    """

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target:
            return found[0]
        old = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if old not in exported:
            return found["text"]
        here = posixpath.dirname(renames.get(path, path))
        new = posixpath.relpath(renames.get(old, old), here)
        return f"[{found['text']}]({new}{found['part'] or ''})"

    return _LINK.sub(link, text)


def renamed_mentions(text: str, renames: Mapping[str, str]) -> str:
    """A text in which renamed files are called by their new names."""
    for old, new in renames.items():
        text = text.replace(old, new)
        name = re.escape(posixpath.basename(old))
        text = re.sub(rf"(?<![\w/.-]){name}", posixpath.basename(new), text)
    return text


def conftest(folders: Iterable[str]) -> str:
    """The `conftest.py` that does what `pyproject.toml` does here."""
    listed = "".join(f'    "{folder}",\n' for folder in folders)
    return (
        SPDX
        + COPYRIGHT
        + f'''"""What the tests of the KV hand-off import, and how they are run."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (
{listed})

sys.path += [str(ROOT / folder) for folder in FOLDERS]


def pytest_configure(config: pytest.Config) -> None:
    """Know the markers of plugins that may be absent."""
    config.addinivalue_line("markers", "timeout(seconds): by pytest-timeout")
'''
    )


def _with_import(text: str, line: str) -> str:
    tree = ast.parse(text)
    last = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not is_docstring and not is_future:
            break
        last = node.end_lineno or last
    lines = text.splitlines(keepends=True)
    last = last or text.count("# SPDX", 0, 200)
    return "".join([*lines[:last], "\n", line, *lines[last:]])
