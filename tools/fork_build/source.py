# SPDX-License-Identifier: Apache-2.0
"""Gets the source distribution of a version of the base, and unpacks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.fetch import CACHE_VARIABLE, sha256_of
from fork_build.pins import WheelPin

DISTRIBUTION = "vllm"
_BACKEND = Path(__file__).parent / "metadata_only"
_STDERR = 2


def fetch_source(
    version: str,
    cache: Path,
    pip: Sequence[str],
    pin: WheelPin | None = None,
    distribution: str = DISTRIBUTION,
) -> Path:
    """Return the path of the source distribution, downloading it if need be.

    pip downloads and verifies it by the hash that its index states; nothing of it is
    run. The file appears in the cache only when complete.

    Args:
        version: of the base.
        cache: the folder in which it is kept.
        pip: command line of pip.
        pin: file name and SHA-256 that it must have, where they are known.
        distribution: its name on the index.

    Raises:
        BuildError: pip failed or gave another file than the pinned one.
    """
    final = cache / (pin.file if pin else f"{distribution}-{version}.tar.gz")
    if final.exists():
        if pin is None or sha256_of(final) == pin.sha256:
            return final
        print(f"{final} does not match its pin; downloading it again", file=sys.stderr)
        final.unlink()
    requirement = f"{distribution}=={version}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as folder:
            print(f"fetching the source distribution {requirement}", file=sys.stderr)
            _run_pip([*pip, "download", f"--dest={folder}"], requirement)
            (fresh,) = Path(folder).iterdir()
            if pin and (fresh.name != pin.file or sha256_of(fresh) != pin.sha256):
                raise BuildError(
                    f"pip downloaded {fresh.name} with sha256 {sha256_of(fresh)}, but "
                    f"{pin.file} with {pin.sha256} is pinned. It was deleted; check "
                    "pip's settings (`pip config list`)"
                )
            final = cache / fresh.name
            os.replace(fresh, final)
    except OSError as error:
        raise BuildError(
            f"cannot keep the source distribution in {cache}: {error}. Free space "
            f"there or name another folder with {CACHE_VARIABLE}"
        ) from error
    return final


def resolve_source(
    version: str, pip: Sequence[str], distribution: str = DISTRIBUTION
) -> WheelPin:
    """File name and SHA-256 of a version's source distribution, as the index has them.

    Raises:
        BuildError: pip does not find it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed"]
        _run_pip([*command, f"--report={report}"], f"{distribution}=={version}")
        (item,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    info = item["download_info"]
    return WheelPin(
        info["url"].rpartition("/")[2], info["archive_info"]["hashes"]["sha256"]
    )


def unpack_source(archive: Path, folder: Path) -> Path:
    """Unpack into `folder` and return the tree's root.

    Raises:
        BuildError: the archive is damaged, or holds anything but one folder.
    """
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise BuildError(
            f"cannot unpack {archive}: {error}. Delete it, so that it is fetched again"
        ) from error
    found = sorted(folder.iterdir())
    if len(found) != 1 or not (found[0] / "PKG-INFO").is_file():
        raise BuildError(
            f"{archive.name} holds {', '.join(path.name for path in found)}, expected "
            "one folder with a PKG-INFO: it is no source distribution"
        )
    return found[0]


def _run_pip(command: Sequence[str], requirement: str) -> None:
    path = os.pathsep.join(
        part for part in (str(_BACKEND), os.environ.get("PYTHONPATH", "")) if part
    )
    outcome = subprocess.run(
        [
            *command,
            "--no-deps",
            "--no-build-isolation",
            "--no-binary=:all:",
            requirement,
        ],
        stdout=_STDERR,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if outcome.returncode != 0:
        raise BuildError(
            f"pip could not get the source distribution of {requirement} (exit status "
            f"{outcome.returncode}, its reason is above). Check the version, the "
            "network and pip's settings (`pip config list`)"
        )
