# SPDX-License-Identifier: Apache-2.0
"""The compiled module, made by the real CMake and compiler from the real sources."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fake_fork import OWN, FakeFork
from fork_build import install as install_module
from fork_build.checkout import own_files, stray_files
from fork_build.install import install
from fork_build.native import (
    PRODUCT,
    compile_native,
    find_compiler,
    is_current,
    lay_native,
    problem_of,
    remove_native,
)
from fork_build.pins import REPOSITORY, load_pins

COMPILERS = ("c++", "g++", "clang++")
needs_compiler = pytest.mark.skipif(
    find_compiler(os.environ) is None, reason="no C++ compiler here"
)


@pytest.fixture
def sources(fork: FakeFork) -> FakeFork:
    """The fake checkout with the sources of the compiled module."""
    shutil.copy(REPOSITORY / "CMakeLists.txt", fork.root)
    shutil.copytree(REPOSITORY / "csrc", fork.root / "csrc")
    fork.git("add", ".")
    return fork


def paths_without(folder: Path, *missing: str) -> str:
    """A search path with links to all programs of the present one but some."""
    folder.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            link.unlink(missing_ok=True)
            if program.name not in missing:
                link.symlink_to(program)
    return str(folder)


@needs_compiler
def test_it_is_made_once_and_invisible_to_git(sources: FakeFork) -> None:
    root, product = sources.root, sources.root / PRODUCT
    sources.build().lay()
    assert not is_current(root)
    lay_native(root)
    assert problem_of(root) == ""
    assert is_current(root)
    code = "import _native; print(_native.token_digests([1], 1, 8, 0).hex())"
    told = subprocess.check_output([sys.executable, "-c", code], cwd=product.parent)
    expected = hashlib.blake2b((1).to_bytes(8, sys.byteorder), digest_size=8)
    assert told.decode().strip() == expected.hexdigest()
    assert sources.git("status", "--porcelain", "--", OWN) == f"A  {OWN}/__init__.py\n"
    assert stray_files(root) == []
    assert own_files(root, load_pins(root)) == [f"{OWN}/__init__.py"]
    made = product.stat()
    lay_native(root)
    assert product.stat().st_mtime_ns == made.st_mtime_ns
    product.unlink()
    assert not is_current(root)
    lay_native(root)
    with (root / "csrc/nixl/planner.h").open("a") as header:
        header.write("// changed\n")
    assert not is_current(root)
    lay_native(root)
    assert product.stat().st_mtime_ns > made.st_mtime_ns
    assert sorted(path.name for path in (root / ".base").iterdir()) == [
        "lock",
        "native.json",
        "stamp.json",
    ]
    remove_native(root)
    assert not product.exists()


@needs_compiler
def test_sources_that_do_not_compile_leave_no_module_and_say_where(
    sources: FakeFork, capsys: pytest.CaptureFixture[str]
) -> None:
    root = sources.root
    lay_native(root)
    with (root / "csrc/nixl/planner.cpp").open("a") as text:
        text.write("int broken = ;\n")
    lay_native(root)
    assert not (root / PRODUCT).exists()
    assert "numpy is used instead" in problem_of(root)
    assert "planner.cpp" in problem_of(root)
    assert problem_of(root) in capsys.readouterr().err
    # The same sources would fail again.
    assert is_current(root)


@pytest.mark.parametrize(
    ("missing", "said"),
    [(COMPILERS, "no C++ compiler found"), (("cmake",), "no cmake found")],
)
def test_what_is_missing_is_said_in_one_line(
    sources: FakeFork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: tuple[str, ...],
    said: str,
) -> None:
    if said == "no cmake found" and (Path(sys.executable).parent / "cmake").exists():
        # It would be found there, whatever the path says.
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", paths_without(tmp_path / "bin", *missing))
    if "cmake" in missing and find_compiler(os.environ) is None:
        pytest.skip("no C++ compiler here")
    problem = compile_native(sources.root, tmp_path / "library", tmp_path)
    assert said in problem
    assert capsys.readouterr().err == problem + "\n"


@needs_compiler
def test_missing_headers_of_python_are_named(
    sources: FakeFork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    problem = compile_native(sources.root, tmp_path / "library", tmp_path)
    assert f"{tmp_path}/Python.h does not exist" in problem


def test_install_goes_on_without_a_compiler_and_tries_again_with_one(
    sources: FakeFork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # pip is replaced by the part of its work that this test is about.
    calls: list[str] = []

    def run_pip(_pip: list[str], arguments: list[str]) -> None:
        calls.append(arguments[-1])
        lay_native(sources.root)
        # pip shows nothing of what a successful build says.
        capsys.readouterr()

    monkeypatch.setattr(install_module, "run_pip", run_pip)
    monkeypatch.delenv("CXX", raising=False)
    environment = tmp_path / "venv"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", paths_without(tmp_path / "bin", *COMPILERS))
        assert install(sources.build(), environment, ["dev"])
        assert "numpy is used instead" in capsys.readouterr().err
        assert not install(sources.build(), environment, ["dev"])
    assert len(calls) == 1
    if find_compiler(os.environ):
        assert install(sources.build(), environment, ["dev"])
        assert not install(sources.build(), environment, ["dev"])
        assert len(calls) == 2
        assert (sources.root / PRODUCT).is_file()


@needs_compiler
def test_wheel_has_a_module_of_its_own(sources: FakeFork, tmp_path: Path) -> None:
    stale = sources.root / PRODUCT
    stale.write_bytes(b"left over")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    subprocess.run(
        [
            *command,
            "--no-build-isolation",
            f"--wheel-dir={tmp_path / 'wheels'}",
            str(sources.root),
        ],
        env={**os.environ, **sources.environ},
        check=True,
    )
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        module = archive.read(PRODUCT.as_posix())
        assert f"{OWN}/__init__.py" in archive.namelist()
    assert module.startswith(b"\x7fELF")
    assert stale.read_bytes() == b"left over"
