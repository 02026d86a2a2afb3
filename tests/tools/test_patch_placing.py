# SPDX-License-Identifier: Apache-2.0
"""Which file of ours goes into which commit of the series."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fork_build.pins import REPOSITORY
from patch_export.errors import ExportError
from patch_export.export import own_sources
from patch_export.imports import imported_files, imported_names
from patch_export.placing import Placing, place
from patch_export.table import Commit, Table, load_table, matches


def commit(key: str, *files: str) -> Commit:
    return Commit(key=key, title=key, body=key, files=files, removes=(), edits=())


def table(*commits: Commit, **fork: str) -> Table:
    return Table(
        package="pkg",
        roots=("", "tests"),
        tests=("tests/**",),
        after={},
        fork={f"{name}.py": reason for name, reason in fork.items()},
        renames={},
        commits=(commit("remove"), *commits),
    )


def placed(table: Table, sources: Mapping[str, str]) -> Mapping[str, int]:
    return place(table, sources).commits


@pytest.fixture(scope="module")
def ours() -> tuple[Table, dict[str, str], Placing]:
    table, sources = load_table(), own_sources(REPOSITORY)
    return table, sources, place(table, sources)


def test_every_file_of_ours_has_one_place(
    ours: tuple[Table, dict[str, str], Placing],
) -> None:
    _, sources, placing = ours
    assert placing.commits.keys() | placing.fork.keys() == sources.keys()
    assert not placing.commits.keys() & placing.fork.keys()
    assert "tools/fork_build/fetch.py" in placing.fork


def test_no_commit_imports_what_a_later_one_brings(
    ours: tuple[Table, dict[str, str], Placing],
) -> None:
    table, sources, placing = ours
    early = {path for commit in table.commits for path in commit.early}
    looked_at = 0
    for path, index in placing.commits.items():
        if not path.endswith(".py"):
            continue
        needed = imported_files(
            sources[path], path, sources.keys(), table.roots, table.renames
        )
        looked_at += len(needed)
        for other in needed - early:
            assert placing.commits[other] <= index, (path, other)
    assert looked_at > 500


def test_tests_come_with_the_module_that_they_test(
    ours: tuple[Table, dict[str, str], Placing],
) -> None:
    table, _, placing = ours
    unit = "tests/v1/kv_connector/unit/nixl"
    for module, test in [
        ("wire/notifications.py", "test_notifications.py"),
        ("handoff/sender.py", "test_sender.py"),
        ("handoff/desk.py", "test_desk.py"),
        ("layout.py", "test_layout.py"),
        ("auth.py", "test_auth.py"),
        ("correspondence.py", "test_correspondence.py"),
        ("transfer_loop.py", "test_transfer_loop.py"),
        ("scheduler/pins.py", "test_pins.py"),
        ("scheduler/retention.py", "test_retention.py"),
        ("worker/shapes.py", "test_shapes.py"),
    ]:
        path = f"{table.package}/{module}"
        assert placing.commits[f"{unit}/{test}"] == placing.commits[path], module


def test_a_new_file_without_place_is_named_with_the_remedy() -> None:
    sources = own_sources(REPOSITORY)
    sources[f"{load_table().package}/brand_new.py"] = ""
    with pytest.raises(ExportError, match=r"brand_new\.py has no place: add it to a"):
        place(load_table(), sources)


def test_an_import_of_a_later_commit_is_named() -> None:
    sources = own_sources(REPOSITORY)
    package = load_table().package
    sources[f"{package}/ids.py"] += "\nfrom .scheduler import pins\n"
    with pytest.raises(ExportError, match=r"ids\.py of commit 'machines'.*'scheduler'"):
        place(load_table(), sources)


def test_two_places_and_unused_entries_are_named() -> None:
    wanted = table(commit("one", "pkg/a.py"), commit("two", "pkg/*.py", "pkg/no.py"))
    with pytest.raises(ExportError) as told:
        place(wanted, {"pkg/a.py": ""})
    assert "pkg/a.py has more than one place: commits 'one' and 'two'" in str(
        told.value
    )
    assert "the entry 'pkg/no.py' fits no tracked file" in str(told.value)


def test_a_test_goes_as_early_as_its_imports_allow() -> None:
    sources = {
        "pkg/a.py": "",
        "pkg/b.py": "from . import a",
        "tests/helper.py": "",
        "tests/test_a.py": "from pkg.a import thing",
        "tests/test_b.py": "import helper\nimport pkg.b",
        "tests/conftest.py": "",
    }
    wanted = table(commit("one", "pkg/a.py"), commit("two", "pkg/b.py"))
    found = placed(wanted, sources)
    assert found["tests/test_a.py"] == 1
    assert found["tests/test_b.py"] == 2
    assert found["tests/helper.py"] == 2, "it comes where it is first used"
    later = replace(wanted, after={"tests/test_a.py": "two"})
    assert placed(later, sources)["tests/test_a.py"] == 2


def test_a_test_of_what_stays_here_is_refused() -> None:
    sources = {"pkg/a.py": "", "own.py": "", "tests/test_own.py": "import own"}
    with pytest.raises(ExportError, match=r"imports own\.py, which stays in the fork"):
        place(table(commit("one", "pkg/a.py"), own="ours"), sources)


def test_imports_are_read_wherever_they_stand() -> None:
    source = (
        "from .. import near\n"
        "from ...far.off import thing\n"
        "def later():\n    import pkg.inner.deep\n"
    )
    assert imported_names(source, "pkg/inner/sub/mod.py") == {
        "pkg.inner.near",
        "pkg.far.off.thing",
        "pkg.inner.deep",
    }
    files = {"pkg/inner/near.py", "pkg/far/off/__init__.py", "pkg/inner/deep.py"}
    assert imported_files(source, "pkg/inner/sub/mod.py", files, [""], {}) == files


def test_patterns() -> None:
    assert matches("a/*.py", "a/b.py")
    assert not matches("a/*.py", "a/b/c.py")
    assert matches("a/**", "a/b/c.py")
    assert not matches("a.py", "axpy")
