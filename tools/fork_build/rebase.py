# SPDX-License-Identifier: Apache-2.0
"""Pins another version of the base: resolves the wheels and rewrites the pin file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.pins import PIN_FILE, Pins, TargetPin, WheelPin, load_pins
from fork_build.source import resolve_source

_STDERR = 2
MACHINES = ("x86_64", "aarch64")
_GLIBC_MINORS = range(40, 16, -1)
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?")


def rebase(root: Path, version: str, pip: list[str]) -> Pins:
    """Resolve the wheels of `version` and rewrite the pin file.

    Nothing is written unless every target has a wheel for every machine.

    Raises:
        BuildError: the version is malformed, or a wheel cannot be found.
    """
    if not _VERSION.fullmatch(version):
        raise BuildError(
            f"VERSION={version!r} is no version; expected one such as 0.33.0"
        )
    pins = load_pins(root)
    resolved = {
        target.name: [_resolve(target, version, machine, pip) for machine in MACHINES]
        for target in pins.targets.values()
    }
    source = resolve_source(version, pip) if pins.source else None
    path = root / PIN_FILE
    text = rewrite(path.read_text(encoding="utf-8"), version, resolved, source)
    path.write_text(text, encoding="utf-8")
    return load_pins(root)


def rewrite(
    text: str,
    version: str,
    wheels: dict[str, list[WheelPin]],
    source: WheelPin | None = None,
) -> str:
    """Put a version, wheels and source into the text of a pin file; keep all else."""
    text, count = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', text)
    if count != 1:
        raise BuildError(f"{PIN_FILE}: expected one line `version = …`, found {count}")
    tables = {f"targets.{name}.wheels": pins for name, pins in wheels.items()}
    if source:
        tables["source"] = [source]
    for table, pins in tables.items():
        lines = "".join(f'"{pin.file}" = "{pin.sha256}"\n' for pin in pins)
        header = f"[{table}]\n"
        before, found, rest = text.partition(header)
        if not found:
            raise BuildError(f"{PIN_FILE}: the table [{table}] is missing")
        rest = re.sub(r'\A(?:"[^\n]*\n)*', "", rest)
        text = before + header + lines + rest
    return text


def _resolve(target: TargetPin, version: str, machine: str, pip: list[str]) -> WheelPin:
    requirement = f"{target.distribution}=={version}"
    print(f"resolving {requirement} for {machine}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *pip,
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--only-binary=:all:",
            f"--target={folder}/target",
            f"--report={report}",
            *(f"--platform=manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS),
            requirement,
        ]
        outcome = subprocess.run(command, stdout=_STDERR, check=False)
        if outcome.returncode != 0:
            raise BuildError(
                f"pip found no wheel of {requirement} for Linux {machine}; its reason "
                f"is above. {PIN_FILE} was left as it is"
            )
        (item,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    info = item["download_info"]
    file = info["url"].rpartition("/")[2]
    return WheelPin(file, info["archive_info"]["hashes"]["sha256"])
