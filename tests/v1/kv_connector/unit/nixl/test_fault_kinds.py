# SPDX-License-Identifier: Apache-2.0
"""The tests that the table of fault kinds names are there."""

from v1.kv_connector.unit.nixl.doc_tables import DOCS, exists, named_tests, rows

PAGE = DOCS / "design" / "fault_kinds.md"
COLUMNS = ["kind", "why it cannot happen here", "tests", "reported as"]


def _problems(text: str) -> list[str]:
    problems: list[str] = []
    for cells in rows(text, COLUMNS):
        if len(cells) != len(COLUMNS) or not all(cells):
            problems.append(f"{cells[0]}: {len(cells)} cells, or an empty one")
            continue
        named = named_tests(cells[2])
        if not named:
            problems.append(f"{cells[0]}: no test")
        problems += [
            f"{cells[0]}: {name} does not exist" for name in named if not exists(name)
        ]
    return problems


def _planted(tests: str) -> str:
    return PAGE.read_text(encoding="utf-8").replace(
        "|---|---|---|---|", f"|---|---|---|---|\n| planted | never | {tests} | - |", 1
    )


def test_every_test_of_the_table_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kinds = [cells[0] for cells in rows(text, COLUMNS)]
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
