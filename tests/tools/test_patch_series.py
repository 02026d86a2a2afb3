# SPDX-License-Identifier: Apache-2.0
"""The series over upstream's own sources: each commit imports, and its tests pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import export_patch
from fake_upstream import git
from fork_build.fetch import cache_directory, pip_command
from fork_build.pins import REPOSITORY, load_pins
from fork_build.source import fetch_source, unpack_source
from patch_export.table import load_table

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]

KEYS = [commit.key for commit in load_table().commits]
PACKAGE = load_table().package
TESTS = "tests/v1/kv_connector"
# With the archive's own, no engine computes a step on a CPU: it looks for an argument
# that its caller does not have. Upstream's wheel of the same version has it mended.
MENDED_IN_THE_WHEEL = "vllm/utils/cpu_triton_utils.py"
# Real engines of that tree; the other tests of engines are collected.
RUN_WITH_ENGINES = {
    "test_conversations.py",
    "test_moved.py",
    "test_multi_connector.py",
    "test_serving.py",
    "test_token.py",
    "test_verify.py",
}
SIGNOFF = "Ada Example <ada@example.org>"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pins = load_pins(REPOSITORY)
    cache = cache_directory(os.environ)
    archive = fetch_source(pins.version, cache, pip_command(), pins.source)
    return unpack_source(archive, tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def tree(released: Path) -> Path:
    """The sources with the series on a branch, and the base wheel's compiled parts."""
    command = ["--vllm", str(released), "--series", "--signoff", SIGNOFF]
    assert export_patch.main(command) == 0
    for library in (REPOSITORY / "vllm").glob("*.so"):
        shutil.copy2(library, released / "vllm")
    # The environment's own metadata say for which platform this is built.
    stale = git(released, "ls-files", "*.egg-info/*").splitlines()
    git(released, "update-index", "--skip-worktree", MENDED_IN_THE_WHEEL, *stale)
    shutil.copy2(REPOSITORY / MENDED_IN_THE_WHEEL, released / MENDED_IN_THE_WHEEL)
    for folder in {(released / path).parent for path in stale}:
        shutil.rmtree(folder)
    # Upstream's own rules hide the libraries.
    assert git(released, "status", "--porcelain") == ""
    return released


def run(tree: Path, *arguments: str) -> str:
    """What the Python of this environment prints in the tree, whose vllm it imports."""
    outcome = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={
            **os.environ,
            # Where scripts find the same Python.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-3000:]
    return outcome.stdout


def run_pytest(tree: Path, *arguments: str) -> str:
    # Above this folder are fixtures for models, with requirements of their own.
    fixed = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={TESTS}"]
    return run(tree, *fixed, "--show-capture=no", "-m", "not optional", *arguments)


def at(tree: Path, key: str) -> list[str]:
    """Check a commit out, and return the files that it adds."""
    last = len(KEYS) - 1 - KEYS.index(key)
    git(tree, "checkout", "--quiet", "--detach", f"nixl-handoff~{last}")
    return git(
        tree, "diff", "--name-only", "--diff-filter=A", "HEAD~", "HEAD"
    ).splitlines()


@pytest.mark.parametrize("key", KEYS)
def test_a_commit_imports_and_its_tests_pass(tree: Path, key: str) -> None:
    added = at(tree, key)
    modules = [
        path.relative_to(tree).with_suffix("").as_posix().replace("/", ".")
        for path in (tree / PACKAGE).rglob("*.py")
        if path.name != "__init__.py"
    ]
    factory = "vllm.distributed.kv_transfer.kv_connector.factory"
    told = run(
        tree,
        "-c",
        "import importlib, sys\n"
        f"for name in {[factory, *modules]!r}:\n"
        "    importlib.import_module(name)\n"
        f"known = sys.modules[{factory!r}].KVConnectorFactory._registry\n"
        "ours = sorted(name for name in known if name.startswith('Nixl'))\n"
        "print('registered', *ours)\n"
        "for name in ours:\n"
        "    assert (known[name]().mode.value == 'push') == ('Push' in name)\n"
        "import vllm\nprint('from', vllm.__file__)",
    )
    assert f"from {tree}" in told
    pull = ["NixlConnector", "NixlPullConnector"]
    done = KEYS.index(key)
    expected = pull if done >= KEYS.index("pull") else []
    expected += ["NixlPushConnector"] if done >= KEYS.index("push") else []
    assert ["registered", *expected] == next(
        line.split() for line in told.splitlines() if line.startswith("registered")
    )
    tests = [path for path in added if Path(path).name.startswith("test_")]
    with_engines = [path for path in tests if "nixl_integration" in path]
    without = [path for path in tests if "nixl_integration" not in path]
    if without:
        told = run_pytest(tree, *without)
        print(f"{key}: {told.strip().splitlines()[-1]}")
    run_now = [path for path in with_engines if Path(path).name in RUN_WITH_ENGINES]
    if run_now:
        assert len(run_now) == len(RUN_WITH_ENGINES)
        told = run_pytest(tree, *run_now)
        print(f"{key}: with engines: {told.strip().splitlines()[-1]}")
    if with_engines:
        told = run_pytest(tree, "--collect-only", *with_engines)
        print(f"{key}: with engines, collected: {told.strip().splitlines()[-1]}")


def test_upstream_s_own_checks_of_style(tree: Path) -> None:
    at(tree, KEYS[-1])
    changed = git(
        tree,
        "diff",
        "--name-only",
        "--diff-filter=AM",
        "upstream",
        "HEAD",
        "--",
        "*.py",
    ).splitlines()
    ours = [
        path
        for path in changed
        if git(tree, "ls-tree", "upstream", "--", path) == ""
        or path.startswith(PACKAGE)
    ]
    ruff = str(Path(sys.executable).with_name("ruff"))
    for command in (["check"], ["format", "--check"]):
        outcome = subprocess.run(
            [ruff, *command, "--no-cache", *ours],
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,
        )
        assert outcome.returncode == 0, outcome.stdout[-4000:]


def test_upstream_s_tests_beside_ours_still_pass(tree: Path) -> None:
    at(tree, KEYS[-1])
    # Others beside it fetch a model first.
    beside = ["test_multi_connector.py"]
    paths = [f"{TESTS}/unit/{name}" for name in beside]
    told = run_pytest(tree, "-k", "Stats", *paths)
    print(told.strip().splitlines()[-1])


def test_the_patches_apply_to_a_fresh_tree(tree: Path, tmp_path: Path) -> None:
    git(tree, "format-patch", "-o", str(tmp_path / "patches"), "upstream..nixl-handoff")
    patches = sorted(str(path) for path in (tmp_path / "patches").iterdir())
    assert len(patches) == len(KEYS)
    fresh = tmp_path / "fresh"
    git(tree, "worktree", "add", "--quiet", "--detach", str(fresh), "upstream")
    git(
        fresh,
        *("-c", "user.name=Bo", "-c", "user.email=bo@example.org"),
        *("am", "--quiet", *patches),
    )
    assert git(fresh, "rev-parse", "HEAD^{tree}") == git(
        tree, "rev-parse", "nixl-handoff^{tree}"
    )
