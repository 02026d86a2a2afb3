# SPDX-License-Identifier: Apache-2.0
"""The series over a small tree that has what it touches."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import export_patch
from fake_upstream import DOTTED, FACTORY, PACKAGE, TRIMMED, git, make_tree
from fork_build.pins import REPOSITORY, load_pins
from patch_export import adapt
from patch_export.errors import ExportError
from patch_export.table import Edit, load_table
from patch_export.target import Target
from patch_export.upstream import edited

SIGNOFF = "Ada Example <ada@example.org>"
BASE = load_pins(REPOSITORY).version


@pytest.fixture(autouse=True)
def no_git_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(variable, str(tmp_path / "no-such-file"))
    for variable in ("EMAIL", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.delenv(variable, raising=False)


def export(root: Path, *options: str, signoff: str | None = SIGNOFF) -> int:
    signed = ["--signoff", signoff] if signoff else []
    return export_patch.main(["--vllm", str(root), *signed, *options])


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_tree(tmp_path_factory.mktemp("upstream"), BASE)
    assert export(root, "--series") == 0
    return root


def shown(root: Path, revision: str, path: str) -> str:
    return git(root, "show", f"{revision}:{path}")


def commits(root: Path, branch: str = "nixl-handoff") -> list[str]:
    return git(root, "rev-list", "--reverse", f"upstream..{branch}").split()


def test_one_commit_per_entry_and_each_is_signed(series: Path) -> None:
    entries = load_table().commits
    made = commits(series)
    assert len(made) == len(entries)
    for revision, entry in zip(made, entries, strict=True):
        message = git(series, "log", "-1", "--format=%B", revision)
        assert message.startswith(f"{entry.title}\n\n")
        assert message.rstrip().endswith(f"\nSigned-off-by: {SIGNOFF}")
        author = git(series, "log", "-1", "--format=%an <%ae>", revision)
        assert author.strip() == SIGNOFF


def test_the_tree_itself_is_not_touched(series: Path) -> None:
    assert git(series, "symbolic-ref", "--short", "HEAD") == "upstream\n"
    assert git(series, "status", "--porcelain") == ""
    assert (series / PACKAGE / "worker.py").exists()


def test_the_first_commit_only_removes(series: Path) -> None:
    first = commits(series)[0]
    changes = git(series, "diff", "--name-status", f"{first}~", first).splitlines()
    assert not [line for line in changes if line.startswith("A")]
    assert git(series, "ls-tree", "-r", "--name-only", first, PACKAGE) == ""
    assert "Nixl" not in shown(series, first, FACTORY)
    assert "MultiConnector" in shown(series, first, FACTORY)
    generator = shown(series, first, "docs/mkdocs/gen_files/generate_metrics.py")
    scope: dict[str, list[dict[str, str]]] = {}
    exec(generator, scope)
    assert [entry["key"] for entry in scope["SOURCES"]] == [
        "metrics-one",
        "metrics-another",
    ]
    assert shown(series, first, "docs/usage/metrics.md") == "# Metrics\n\n## Others\n"


def test_names_are_registered_again_where_they_work(series: Path) -> None:
    keys = [entry.key for entry in load_table().commits]
    made = dict(zip(keys, commits(series), strict=True))
    pull = shown(series, made["pull"], FACTORY)
    assert '"NixlConnector"' in pull
    assert '"NixlPullConnector"' in pull
    assert '"NixlPushConnector"' not in pull
    assert shown(series, made["push"], FACTORY) == shown(series, "upstream", FACTORY)


def test_what_uses_the_removed_package_is_dropped_and_no_more(series: Path) -> None:
    keys = [entry.key for entry in load_table().commits]
    made = dict(zip(keys, commits(series), strict=True))
    path = "tests/v1/kv_connector/unit/test_multi_connector.py"
    removed = shown(series, made["remove"], path)
    assert "def test_of_something_else" in removed
    assert "def test_without" in removed
    for gone in ("helper", "NixlKVConnectorStats", "json", DOTTED):
        assert gone not in removed
    # Our package has the class of that name again.
    pull = shown(series, made["pull"], path)
    assert "def test_stats" in pull
    assert "helper" not in pull
    compile(pull, path, "exec")


def test_the_last_commit_holds_our_files(series: Path) -> None:
    last = commits(series)[-1]
    listed = git(series, "ls-tree", "-r", "--name-only", last).splitlines()
    ours = sorted(
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / PACKAGE).rglob("*.py")
    )
    theirs = [name for name in listed if name.startswith(PACKAGE + "/")]
    assert theirs == ours
    assert "setup.py" not in listed
    assert not [name for name in listed if "fork_build" in name]
    codec = shown(series, last, f"{PACKAGE}/wire/codec.py").splitlines()
    assert codec[:2] == [adapt.SPDX.strip(), adapt.COPYRIGHT.strip()]
    early = shown(series, commits(series)[1], f"{PACKAGE}/__init__.py")
    assert early.rstrip().endswith('"""')
    assert "import" not in early
    run_sweep = git(series, "ls-tree", last, "benchmarks/disagg/run_sweep.sh")
    assert run_sweep.startswith("100755 ")


def test_tests_move_as_upstream_runs_them(series: Path) -> None:
    last = commits(series)[-1]
    listed = git(series, "ls-tree", "-r", "--name-only", last, "tests").splitlines()
    unit = "tests/v1/kv_connector/unit"
    assert f"{unit}/nixl/__init__.py" in listed
    assert f"{unit}/pd_router/__init__.py" in listed
    assert adapt.CONFTEST_PATH in listed
    for name in listed:
        if not name.endswith(".py") or "/kv_connector/" not in name:
            continue
        text = shown(series, last, name)
        assert "from v1." not in text, name
        assert "pytest.mark.full" not in text, name
        asynchronous = text.count("async def test_")
        assert text.count("@pytest.mark.asyncio") == asynchronous, name
        if asynchronous:
            assert "\nimport pytest\n" in text, name
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    path = settings["tool"]["pytest"]["ini_options"]["pythonpath"]
    assert {*path} == {*load_table().roots} - {""}


def test_files_are_as_upstream_s_ruff_wants_them(series: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    git(series, "worktree", "add", "--quiet", "--detach", str(tree), "nixl-handoff")
    added = git(tree, "diff", "--name-only", "--diff-filter=A", "upstream", "HEAD")
    python = [path for path in added.splitlines() if path.endswith(".py")]
    # The small tree has few of the modules that are imported from these.
    first_party = "lint.isort.known-first-party=['vllm', 'tests']"
    for command in (["check", "--config", first_party], ["format", "--check"]):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *command, "--no-cache", *python],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]


def test_pages_have_no_dangling_link(series: Path) -> None:
    last = commits(series)[-1]
    listed = git(series, "ls-tree", "-r", "--name-only", last, "docs").splitlines()
    assert "docs/design/nixl_faults.md" in listed
    assert "docs/design/faults.md" not in listed
    everything = set(git(series, "ls-tree", "-r", "--name-only", last).splitlines())
    folders = {
        parent.as_posix() for name in everything for parent in Path(name).parents
    }
    checked = 0
    for name in listed:
        if not name.endswith(".md"):
            continue
        for found in adapt._LINK.finditer(shown(series, last, name)):
            if "://" in found["target"]:
                continue
            target = (series / name).parent.joinpath(found["target"]).resolve()
            place = target.relative_to(series.resolve()).as_posix()
            assert place in everything | folders, (name, found[0])
            checked += 1
    assert checked > 20


def test_the_patches_apply_to_a_fresh_tree(series: Path, tmp_path: Path) -> None:
    git(
        series,
        "format-patch",
        "-o",
        str(tmp_path / "patches"),
        "upstream..nixl-handoff",
    )
    fresh = make_tree(tmp_path / "fresh", BASE)
    git(fresh, "init", "--quiet")
    git(fresh, "config", "user.name", "Bo")
    git(fresh, "config", "user.email", "bo@example.org")
    git(fresh, "add", "--all")
    git(fresh, "commit", "--quiet", "-m", "as released")
    patches = sorted(str(path) for path in (tmp_path / "patches").iterdir())
    assert len(patches) == len(load_table().commits)
    git(fresh, "am", "--quiet", *patches)
    tree = git(series, "rev-parse", "nixl-handoff^{tree}")
    assert git(fresh, "rev-parse", "HEAD^{tree}") == tree


def test_one_commit_gives_the_same_tree(series: Path) -> None:
    assert export(series, "--branch", "single") == 0
    assert len(commits(series, "single")) == 1
    assert git(series, "rev-parse", "single^{tree}") == git(
        series, "rev-parse", "nixl-handoff^{tree}"
    )


def test_another_version_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path / "newer", "9.9.0")
    assert export(root) == 1
    told = capsys.readouterr().err
    assert f"is vLLM 9.9.0, but the fork is made for {BASE}" in told
    assert "make rebase-check BASE=9.9.0" in told
    assert not (root / ".git").exists()


def test_an_unknown_version_is_refused_until_a_tag_tells_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "clone", BASE)
    (root / "PKG-INFO").unlink()
    with pytest.raises(ExportError, match=f"Check out the tag v{BASE}"):
        Target(root).refuse_unless_base(BASE)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    identity = ("-c", "user.name=Bo", "-c", "user.email=bo@example.org")
    git(root, *identity, "commit", "--quiet", "-m", "tagged")
    git(root, "tag", f"v{BASE}")
    Target(root).refuse_unless_base(BASE)


def test_local_changes_and_the_branch_of_before_are_refused(
    series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(series) == 1
    assert "has a 'nixl-handoff' already, and nothing is rewritten" in (
        capsys.readouterr().err
    )
    (series / "left.txt").write_text("")
    try:
        assert export(series, "--branch", "other") == 1
        assert "local changes:\n  ?? left.txt" in capsys.readouterr().err
    finally:
        (series / "left.txt").unlink()


def test_without_a_name_nothing_is_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path / "tree", BASE)
    assert export(root, signoff=None) == 1
    assert "signed-off commits only" in capsys.readouterr().err
    assert export(root, signoff="Ada") == 1
    assert "--signoff is 'Ada', expected 'Name <mail@example.org>'" in (
        capsys.readouterr().err
    )


def test_git_s_user_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = tmp_path / "gitconfig"
    configuration.write_text("[user]\nname = Cy\nemail = cy@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(configuration))
    root = make_tree(tmp_path / "tree", BASE)
    identity = Target(root).identity(None)
    assert str(identity) == "Cy <cy@example.org>"


def test_what_is_no_tree_of_upstream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no folder vllm/"):
        Target(tmp_path)


def test_edits_that_find_nothing_are_refused() -> None:
    with pytest.raises(ExportError, match="registers no connector 'Other'"):
        edited("x = 1\n", Edit("factory.py", unregister=("Other",)), ())
    with pytest.raises(ExportError, match="nothing that fits 'y'"):
        edited("x = 1\n", Edit("page.md", substitute=(("y", "z"),)), ())
    with pytest.raises(ExportError, match="no longer uses what the series removes"):
        edited("x = 1\n", Edit("test.py", trim=True), (DOTTED,))
    assert edited(TRIMMED, Edit("test.py"), (DOTTED,)) == TRIMMED


def test_the_command_has_help() -> None:
    command = [sys.executable, export_patch.__file__, "--help"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--series" in outcome.stdout


def test_links_and_names_of_pages() -> None:
    renames = {"docs/design/faults.md": "docs/design/nixl_faults.md"}
    exported = {"docs/design/faults.md", "docs/features/x.md"}
    text = "[a](../design/faults.md#kill) [b](gone.md) [c](https://e.org/faults.md)"
    told = adapt.page(text, "docs/features/x.md", exported, renames)
    assert told == "[a](../design/nixl_faults.md#kill) b [c](https://e.org/faults.md)"
    mention = 'DOCS / "design" / "faults.md"; my-faults.md; docs/design/faults.md'
    assert adapt.renamed_mentions(mention, renames) == (
        'DOCS / "design" / "nixl_faults.md"; my-faults.md; docs/design/nixl_faults.md'
    )
