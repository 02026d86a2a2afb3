# SPDX-License-Identifier: Apache-2.0
"""Reads the base wheel: its file list, and its metadata as setuptools wants it."""

from __future__ import annotations

import base64
import configparser
import csv
import re
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from io import StringIO
from pathlib import Path, PurePosixPath

from fork_build.errors import BuildError

_EXTRA_MARKER = re.compile(
    r"""^(?P<requirement>[^;]*);\s*(?:(?P<condition>.*?)\s+and\s+)?"""
    r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]\s*$"""
)
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_SEPARATORS = re.compile(r"[-_.]+")


@dataclass(frozen=True)
class BaseMetadata:
    """What our distribution carries over from the base wheel."""

    requirements: tuple[str, ...]
    extras: dict[str, list[str]]
    entry_points: dict[str, list[str]]


def requirement_name(requirement: str) -> str:
    """Normalised project name of a requirement such as `Foo_Bar[x]>=1`."""
    match = _NAME.match(requirement)
    if match is None:
        raise BuildError(
            f"the base wheel has a requirement without name: {requirement!r}"
        )
    return _SEPARATORS.sub("-", match[1]).lower()


def base_files(wheel: Path) -> dict[str, str]:
    """Map each file of the wheel, its `.dist-info` left out, to its hex SHA-256.

    Raises:
        BuildError: the wheel is not readable, has no RECORD, or a file in it would
            be unpacked outside the tree.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _dist_info(archive)
            record = archive.read(f"{info}/RECORD").decode("utf-8")
            names = [name for name in archive.namelist() if not name.endswith("/")]
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"cannot read the base wheel {wheel}: {error}") from error
    hashes = {row[0]: row[1] for row in csv.reader(StringIO(record)) if len(row) == 3}
    files: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.parts[0] == info:
            continue
        if path.is_absolute() or ".." in path.parts or path.parts[0] != "vllm":
            raise BuildError(
                f"{wheel.name} holds {name!r}, outside vllm/; this layout of the base "
                "is not supported"
            )
        files[name] = _hex_sha256(wheel, name, hashes.get(name, ""))
    return files


def base_metadata(wheel: Path) -> BaseMetadata:
    """Read requirements, extras and entry points of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _dist_info(archive)
            metadata = archive.read(f"{info}/METADATA").decode("utf-8")
            name = f"{info}/entry_points.txt"
            present = name in archive.namelist()
            points = archive.read(name).decode("utf-8") if present else ""
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"cannot read the base wheel {wheel}: {error}") from error
    headers = Parser().parsestr(metadata, headersonly=True)
    requirements: list[str] = []
    extras: dict[str, list[str]] = {
        extra: [] for extra in headers.get_all("Provides-Extra", [])
    }
    for line in headers.get_all("Requires-Dist", []):
        match = _EXTRA_MARKER.match(line)
        if match is None:
            if "extra" in line.partition(";")[2]:
                raise BuildError(
                    f"{wheel.name}: cannot tell which extra {line!r} belongs to"
                )
            requirements.append(line)
            continue
        requirement = match["requirement"].strip()
        if match["condition"]:
            requirement += f"; {match['condition']}"
        extras.setdefault(match["extra"], []).append(requirement)
    return BaseMetadata(tuple(requirements), extras, _entry_points(points))


def _entry_points(text: str) -> dict[str, list[str]]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return {
        section: [f"{name} = {value}" for name, value in parser.items(section)]
        for section in parser.sections()
    }


def _dist_info(archive: zipfile.ZipFile) -> str:
    for name in archive.namelist():
        folder = name.partition("/")[0]
        if folder.endswith(".dist-info"):
            return folder
    raise KeyError("no .dist-info folder")


def _hex_sha256(wheel: Path, name: str, recorded: str) -> str:
    algorithm, _, value = recorded.partition("=")
    if algorithm != "sha256" or not value:
        raise BuildError(f"{wheel.name}: RECORD has no sha256 for {name!r}")
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
