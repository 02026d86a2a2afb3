# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation that name tests, and the tests that there are.

Files of tests are read, not imported: some of them start engines.
"""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]
DOCS = TESTS.parents[2] / "docs"
QUOTED = re.compile(r"`([^`]*)`")
_NAME = re.compile(r"(?P<path>[^:]*)::(?P<function>\w+)(\[(?P<case>[^]]*)\])?")


def rows(text: str, columns: list[str]) -> list[list[str]]:
    """The rows of all tables with these columns."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells == columns:
            inside = True
        elif inside and not line.startswith("|---"):
            found.append(cells)
    return found


def named_tests(cell: str) -> list[str]:
    """The tests that a cell names, as ``path::test`` or ``path::test[id]``."""
    return [found for found in QUOTED.findall(cell) if ".py" in found]


def exists(name: str) -> bool:
    """Whether there is such a test, and such an explicit id in its file."""
    found = _NAME.fullmatch(name)
    if found is None or found["function"] not in _functions(found["path"]):
        return False
    return found["case"] is None or found["case"] in _case_ids(found["path"])


def is_distributed(name: str) -> bool:
    """Whether the tests of this file start real engines."""
    path = name.partition("::")[0]
    return path.startswith("nixl_integration/") and any(
        isinstance(node, ast.Attribute) and node.attr == "distributed"
        for statement in _tree(path).body
        if isinstance(statement, ast.Assign)
        for node in ast.walk(statement)
    )


@cache
def _tree(path: str) -> ast.Module:
    """A file below the tests of connectors; empty if there is none."""
    file = TESTS / path
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


@cache
def _functions(path: str) -> frozenset[str]:
    return frozenset(
        node.name
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


@cache
def _case_ids(path: str) -> frozenset[str]:
    return frozenset(
        str(node.value.value)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.keyword)
        and node.arg == "id"
        and isinstance(node.value, ast.Constant)
    )
