# SPDX-License-Identifier: Apache-2.0
"""Lays the base wheel's files around ours, and takes them away again.

A stamp file records what was laid. Only what the stamp records, and is unchanged
since, is ever replaced or removed: everything else in the tree is somebody's work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.fetch import sha256_of
from fork_build.pins import Pins, WheelPin
from fork_build.wheel_file import base_files

STATE_FOLDER = Path(".base")
STAMP_FILE = STATE_FOLDER / "stamp.json"


@dataclass(frozen=True)
class Entry:
    """One laid file: its hash, and size and time (ns) by which a change shows."""

    sha256: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Stamp:
    """What was laid.

    Not `complete` from the first file removed or moved until the last. `foreign` are
    files that lay at a path of the base, differed from it, and were left alone.
    """

    wheel: WheelPin
    complete: bool
    own_paths: tuple[str, ...]
    files: Mapping[str, Entry]
    foreign: tuple[str, ...] = ()


def read_stamp(root: Path) -> Stamp | None:
    """Return the stamp of the checkout, or None where nothing was laid.

    Raises:
        BuildError: the stamp is there but not readable.
    """
    path = root / STAMP_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Stamp(
            wheel=WheelPin(**data["wheel"]),
            complete=bool(data["complete"]),
            own_paths=tuple(data["own_paths"]),
            files={name: Entry(**entry) for name, entry in data["files"].items()},
            foreign=tuple(data["foreign"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"cannot read {path}: {error}. Delete it; files that equal the base's are "
            "then recognised by their hash"
        ) from error


def is_laid(root: Path, pins: Pins, wheel: WheelPin) -> bool:
    """Whether exactly this wheel is laid and none of its files is missing."""
    stamp = read_stamp(root)
    return (
        stamp is not None
        and stamp.complete
        and stamp.wheel == wheel
        and stamp.own_paths == pins.own_paths
        and all(os.path.lexists(root / name) for name in (*stamp.files, *stamp.foreign))
    )


def lay(root: Path, pins: Pins, wheel: WheelPin, archive: Path) -> bool:
    """Lay the verified wheel `archive` around our files; return whether work was done.

    Files of an earlier wheel are removed first. The wheel is unpacked into a staging
    folder and moved in only when all of it is there.

    Raises:
        BuildError: files of the base were edited in place, or it cannot be unpacked.
    """
    with exclusive(root):
        return _lay(root, pins, wheel, archive)


def _lay(root: Path, pins: Pins, wheel: WheelPin, archive: Path) -> bool:
    if is_laid(root, pins, wheel):
        return False
    before = read_stamp(root)
    old = before.files if before else {}
    wanted = {
        name: digest
        for name, digest in base_files(archive).items()
        if not pins.owns(name)
    }
    _refuse_edited(root, old, wanted)
    state = root / STATE_FOLDER
    try:
        _remove_stale_staging(state)
        with tempfile.TemporaryDirectory(dir=state, prefix="staging-") as folder:
            staging = Path(folder)
            _unpack(archive, wanted, staging)
            _move_in(root, pins, wheel, staging, wanted, old)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BuildError(
            f"cannot lay {archive.name} into {root}: {error}. Mend the cause (free "
            "space, permissions) and repeat the command; it takes up from here"
        ) from error
    return True


def unpack_for_wheel(pins: Pins, archive: Path, destination: Path) -> None:
    """Unpack the base's files, ours left out, into an empty build folder."""
    names = [name for name in base_files(archive) if not pins.owns(name)]
    _unpack(archive, names, destination)


def remove(root: Path) -> int:
    """Remove the laid files and the stamp; return how many files went.

    Raises:
        BuildError: some of them were edited in place.
    """
    stamp = read_stamp(root)
    if stamp is None:
        return 0
    _refuse_edited(root, stamp.files, {})
    _remove_files(root, stamp.files)
    shutil.rmtree(root / STATE_FOLDER)
    return len(stamp.files)


def edited_files(root: Path, files: Mapping[str, Entry]) -> list[str]:
    """Names of laid files whose content is no longer the base's."""
    edited = []
    for name, entry in files.items():
        path = root / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns):
            continue
        if not path.is_file() or sha256_of(path) != entry.sha256:
            edited.append(name)
    return edited


def _refuse_edited(
    root: Path, files: Mapping[str, Entry], wanted: Mapping[str, str]
) -> None:
    edited = [
        name
        for name in edited_files(root, files)
        if name not in wanted or sha256_of(root / name) != wanted[name]
    ]
    if edited:
        shown = "\n  ".join(sorted(edited)[:20])
        raise BuildError(
            f"{len(edited)} file(s) of the unpacked base were edited in place and "
            f"would be lost:\n  {shown}\nTo keep an edit, list the file in `own_paths` "
            "of tools/fork_build/base.toml and in .gitignore (see CONTRIBUTING.md); "
            "else delete the file. Then repeat the command"
        )


def _unpack(archive: Path, names: Iterable[str], destination: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for name in names:
            info = opened.getinfo(name)
            target = Path(opened.extract(info, destination))
            moment = time.mktime((*info.date_time, 0, 0, -1))
            os.utime(target, (moment, moment))
            if mode := (info.external_attr >> 16) & 0o777:
                target.chmod(mode | 0o600)


def _move_in(
    root: Path,
    pins: Pins,
    wheel: WheelPin,
    staging: Path,
    wanted: Mapping[str, str],
    old: Mapping[str, Entry],
) -> None:
    # Each incomplete stamp names exactly the files that the step after it may leave
    # half done, so that an interrupted run is taken up again.
    _write_stamp(root, Stamp(wheel, False, pins.own_paths, old))
    _remove_files(root, old)
    files: dict[str, Entry] = {}
    foreign: list[str] = []
    for name, digest in wanted.items():
        path = root / name
        if os.path.lexists(path) and (
            path.is_symlink() or not path.is_file() or sha256_of(path) != digest
        ):
            foreign.append(name)
            continue
        status = (staging / name).stat()
        files[name] = Entry(digest, status.st_size, status.st_mtime_ns)
    _write_stamp(root, Stamp(wheel, False, pins.own_paths, files, tuple(foreign)))
    for name in files:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, target)
    _write_stamp(root, Stamp(wheel, True, pins.own_paths, files, tuple(foreign)))
    if foreign:
        print(
            "left as they are, since they differ from the base and the build did not "
            "lay them: " + ", ".join(sorted(foreign)),
            file=sys.stderr,
        )


def _remove_files(root: Path, names: Iterable[str]) -> None:
    folders: set[Path] = set()
    for name in names:
        path = root / name
        path.unlink(missing_ok=True)
        folders.update(parent for parent in path.parents if root in parent.parents)
    for folder in sorted(folders, key=lambda item: len(item.parts), reverse=True):
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Let one process at a time change the tree."""
    path = root / STATE_FOLDER / "lock"
    try:
        path.parent.mkdir(exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_stale_staging(state: Path) -> None:
    for folder in state.glob("staging-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _write_stamp(root: Path, stamp: Stamp) -> None:
    path = root / STAMP_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(stamp), indent=0), encoding="utf-8")
    os.replace(partial, path)
