# SPDX-License-Identifier: Apache-2.0
"""The tests that the table of fault kinds names are there."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parents[2] / "docs" / "design" / "fault_kinds.md"
COLUMNS = ["kind", "why it cannot happen here", "tests", "reported as"]
NAMED = re.compile(r"`([^`]*)`")


@cache
def _functions(path: str) -> frozenset[str]:
    """Names of a file's tests, which is not imported; none if there is no file."""
    file = TESTS / path
    if not file.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def _rows(text: str) -> list[list[str]]:
    """The rows of all tables with a column of tests."""
    rows: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells == COLUMNS:
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append(cells)
    return rows


def _problems(text: str) -> list[str]:
    problems: list[str] = []
    for cells in _rows(text):
        if len(cells) != len(COLUMNS) or not all(cells):
            problems.append(f"{cells[0]}: {len(cells)} cells, or an empty one")
            continue
        named = [found for found in NAMED.findall(cells[2]) if ".py" in found]
        if not named:
            problems.append(f"{cells[0]}: no test")
        for name in named:
            path, _, function = name.partition("::")
            if function not in _functions(path):
                problems.append(f"{cells[0]}: {name} does not exist")
    return problems


def _planted(tests: str) -> str:
    return PAGE.read_text(encoding="utf-8").replace(
        "|---|---|---|---|", f"|---|---|---|---|\n| planted | never | {tests} | - |", 1
    )


def test_every_test_of_the_table_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kinds = [cells[0] for cells in _rows(text)]
    assert kinds
    assert len(kinds) == len(set(kinds))
    assert _problems(text) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    here = "unit/nixl/test_fault_kinds.py"
    assert _problems(_planted(f"`{here}::test_every_test_of_the_table_exists`")) == []
    for wrong in (f"{here}::test_of_nothing", f"{here}::_planted", here):
        assert _problems(_planted(f"`{wrong}`")) == [f"planted: {wrong} does not exist"]
    gone = "unit/nixl/test_that_is_gone.py::test_a"
    assert _problems(_planted(f"`{gone}`")) == [f"planted: {gone} does not exist"]
    assert _problems(_planted("by thought alone")) == ["planted: no test"]
