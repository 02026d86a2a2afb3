# SPDX-License-Identifier: Apache-2.0
"""Wheel, editable install and sdist, made by the real setuptools."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from fake_fork import FILES, OWN, TAG, FakeFork
from fork_build.checkout import distribution_files
from fork_build.native import PRODUCT, find_compiler
from fork_build.pins import REPOSITORY, load_pins

LAID = {name for name in FILES if not name.startswith(OWN)}


def backend(fork: FakeFork, hook: str, output: Path) -> Path:
    """Call one hook of the build backend, as pip does."""
    output.mkdir()
    code = f"from setuptools import build_meta as b; b.{hook}({str(output)!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=fork.root,
        env={**os.environ, **fork.environ},
        check=True,
    )
    (made,) = output.iterdir()
    return made


def pip_wheel(root: Path, output: Path, *options: str, **environ: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options]
    subprocess.run(
        [*command, f"--wheel-dir={output}", str(root)],
        env={**os.environ, **environ},
        check=True,
    )
    (wheel,) = output.glob("*.whl")
    return wheel


def test_wheel_is_complete_and_needs_no_laid_tree(
    fork: FakeFork, tmp_path: Path
) -> None:
    stray = fork.root / "vllm/stray.py"
    stray.write_text("STRAY = True\n")
    wheel = pip_wheel(
        fork.root, tmp_path / "wheels", "--no-build-isolation", **fork.environ
    )
    assert wheel.name == f"vllm-1.0+cpu.kv1-{TAG}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("vllm/")}
        info = "vllm-1.0+cpu.kv1.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        points = archive.read(f"{info}/entry_points.txt").decode()
        ours = archive.read(f"{OWN}/__init__.py").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
        assert f"Tag: {TAG}\n" in archive.read(f"{info}/WHEEL").decode()
    assert names == LAID | {f"{OWN}/__init__.py"}
    assert ours == "OURS = True\n"
    requirements = metadata.get_all("Requires-Dist", [])
    assert "nixl==1.5.1" in requirements
    assert not any("vision" in line.lower() for line in requirements)
    assert {"bench", "video", "dev", "demo"} <= set(
        metadata.get_all("Provides-Extra", [])
    )
    assert "vllm = vllm.cli:main" in points
    assert "[vllm.general_plugins]\none = vllm.plugins:one" in points
    assert not (fork.root / ".base").exists()
    assert not (fork.root / "build").exists()


def test_editable_imports_the_checkout_from_anywhere(
    fork: FakeFork, tmp_path: Path
) -> None:
    wheel = backend(fork, "build_editable", tmp_path / "wheels")
    assert {name for name in fork.tree() if not name.startswith(OWN)} == LAID
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        assert not [name for name in archive.namelist() if name.startswith("vllm/")]
    package = OWN.replace("/", ".")
    # A module added after the install must be importable without another one.
    (fork.root / OWN / "later.py").write_text("LATER = 'later'\n")
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        f"import vllm, {package}.later as later\n"
        "print(vllm.__file__, later.LATER)\n"
    )
    # -S keeps the environment's own editable install out.
    outcome = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
        text=True,
    )
    assert outcome.stdout.split() == [str(fork.root / "vllm/__init__.py"), "later"]


def test_sdist_holds_what_git_would_track(fork: FakeFork, tmp_path: Path) -> None:
    fork.build().lay()
    (fork.root / OWN / "untracked_yet.py").write_text("NEW = True\n")
    archive = backend(fork, "build_sdist", tmp_path / "sdists")
    with tarfile.open(archive) as opened:
        names = {
            member.name.partition("/")[2]
            for member in opened.getmembers()
            if member.isfile()
        }
    generated = {"PKG-INFO", "setup.cfg"}
    assert names - generated == set(distribution_files(fork.root))
    assert {f"{OWN}/untracked_yet.py", "setup.py", "tools/fork_build/base.toml"} < names
    assert names & LAID == set()


def test_failing_build_shows_the_reason(fork: FakeFork, tmp_path: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=fork.root,
        env={**os.environ, **fork.environ, "VLLM_TARGET_DEVICE": "abacus"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode != 0
    assert outcome.stderr.startswith("error: VLLM_TARGET_DEVICE='abacus'")
    assert "Traceback" not in outcome.stderr


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_real_wheel_from_a_bare_checkout(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    for name in distribution_files(REPOSITORY):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, root / name)
    wheel = pip_wheel(root, tmp_path / "wheels", VLLM_TARGET_DEVICE="cpu")
    pins = load_pins(REPOSITORY)
    ours = {name for name in distribution_files(REPOSITORY) if pins.owns(name)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    if find_compiler(os.environ):
        ours.add(PRODUCT.as_posix())
    assert {name for name in names if pins.owns(name)} == ours
    assert {"vllm/_C.abi3.so", "vllm/py.typed", "vllm/entrypoints/cli/main.py"} <= names
    assert len(names) > 3000
    python = tmp_path / "installed"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            f"--target={python}",
            wheel,
        ],
        check=True,
    )
    outcome = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(python)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert outcome.stdout.strip() == str(python / "vllm/__init__.py")
