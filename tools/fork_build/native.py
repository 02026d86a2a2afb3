# SPDX-License-Identifier: Apache-2.0
"""Compiles the native module with CMake, where there is a compiler.

Without one everything works, but slower: the module's callers have a version in Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.overlay import STATE_FOLDER, exclusive

PRODUCT = Path("vllm/distributed/kv_transfer/kv_connector/v1/nixl/_native.abi3.so")
STAMP_FILE = STATE_FOLDER / "native.json"
_SECONDS = 600


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """The C++ compiler that CMake would take, or None."""
    if named := environ.get("CXX"):
        return shutil.which(named.split()[0])
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next((path for path in found if path), None)


def is_current(root: Path) -> bool:
    """Whether another attempt to compile would change nothing."""
    if not _sources(root):
        return True
    stamp = _read_stamp(root)
    if stamp.get("inputs") != _inputs(root):
        return False
    return bool(stamp.get("problem")) or (root / PRODUCT).is_file()


def lay_native(root: Path) -> None:
    """Compile into the checkout, unless the same was done or tried before."""
    with exclusive(root):
        if is_current(root):
            return
        # What it was compiled from is gone; its callers may expect something newer.
        (root / PRODUCT).unlink(missing_ok=True)
        problem = compile_native(root, root, root / STATE_FOLDER)
        (root / STAMP_FILE).write_text(
            json.dumps({"inputs": _inputs(root), "problem": problem}), encoding="utf-8"
        )


def problem_of(root: Path) -> str:
    """Why the last attempt to compile into the checkout failed; empty if it did not."""
    return str(_read_stamp(root).get("problem", ""))


def remove_native(root: Path) -> None:
    """Take the compiled module out of the checkout."""
    (root / PRODUCT).unlink(missing_ok=True)
    (root / STAMP_FILE).unlink(missing_ok=True)


def compile_native(root: Path, library: Path, scratch: Path) -> str:
    """Compile the module to its place below `library`.

    Args:
        root: the checkout.
        library: where `vllm/` lies.
        scratch: an existing folder on the same file system.

    Returns:
        What kept it from being made, in one line that is also printed; empty where
        it was made or the checkout has no sources for it.
    """
    if not _sources(root):
        return ""
    try:
        _compile(root, library / PRODUCT, scratch)
    except BuildError as error:
        problem = f"the native planner is not built, numpy is used instead: {error}"
        print(problem, file=sys.stderr)
        return problem
    return ""


def _compile(root: Path, target: Path, scratch: Path) -> None:
    if find_compiler(os.environ) is None:
        raise BuildError("no C++ compiler found; install g++ and repeat the command")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise BuildError(
            f"{header} does not exist; install Python's development package (python3-"
            f"dev), delete {STAMP_FILE} and repeat the command"
        )
    cmake = _tool("cmake")
    if cmake is None:
        raise BuildError("no cmake found; install it and repeat the command")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="staging-native-") as folder:
        ninja = _tool("ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        python = f"-DPython_EXECUTABLE={sys.executable}"
        made = Path(folder) / "made"
        _run([cmake, "-S", str(root), "-B", folder, *generator, python])
        _run([cmake, "--build", folder, "--config", "Release", "--parallel", "2"])
        _run([cmake, "--install", folder, "--prefix", str(made)])
        # In one step: a process may be about to load it.
        os.replace(made / target.name, target)


def _tool(name: str) -> str | None:
    """A program on the path, or else in the environment of the running Python."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=beside)


def _run(command: list[str]) -> None:
    try:
        outcome = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{' '.join(command[:2])}` failed: {error}") from error
    if outcome.returncode:
        sys.stderr.write(outcome.stdout)
        lines = [line.strip() for line in outcome.stdout.splitlines()]
        reason = next((line for line in lines if "error" in line.lower()), "")
        raise BuildError(f"`{' '.join(command[:2])}` failed: {reason}")


def _sources(root: Path) -> list[Path]:
    top = root / "CMakeLists.txt"
    if not top.is_file():
        return []
    return [top, *sorted(path for path in (root / "csrc").rglob("*") if path.is_file())]


def _inputs(root: Path) -> str:
    """A digest of all that decides what compiling would give."""
    digest = hashlib.sha256()
    for part in (sysconfig.get_platform(), str(find_compiler(os.environ))):
        digest.update(part.encode() + b"\0")
    for path in _sources(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read_stamp(root: Path) -> Mapping[str, object]:
    try:
        data = json.loads((root / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
