# SPDX-License-Identifier: Apache-2.0
"""The pin file: base version, own paths, and the wheels of each target."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_build.errors import BuildError

REPOSITORY = Path(__file__).resolve().parents[2]
PIN_FILE = Path("tools/fork_build/base.toml")


@dataclass(frozen=True)
class WheelPin:
    """One wheel file of the base and the SHA-256 it must have."""

    file: str
    sha256: str

    @property
    def tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform tag, as the file name states them."""
        python, abi, platform = self.file.removesuffix(".whl").split("-")[-3:]
        return python, abi, platform

    def fits(self, system: str, machine: str) -> bool:
        """Whether the wheel is for `platform.system()` and `platform.machine()`."""
        prefix = {"Linux": "manylinux", "Darwin": "macosx"}.get(system)
        tag = self.tag[2]
        return prefix is not None and tag.startswith(prefix) and tag.endswith(machine)


@dataclass(frozen=True)
class TargetPin:
    """What `VLLM_TARGET_DEVICE` selects."""

    name: str
    distribution: str
    local_label: str
    dropped_requirements: tuple[str, ...]
    wheels: tuple[WheelPin, ...]


@dataclass(frozen=True)
class Pins:
    """The whole pin file."""

    version: str
    fork_label: str
    nixl: str
    own_paths: tuple[str, ...]
    targets: Mapping[str, TargetPin]
    source: WheelPin | None = None
    """The source distribution, where one is pinned."""

    def fork_version(self, target: TargetPin) -> str:
        """Version of our distribution; its local label names the target.

        vLLM's platform detection looks for `cpu` in the installed version.
        """
        return f"{self.version}+{target.local_label}.{self.fork_label}"

    def owns(self, path: str) -> bool:
        """Whether a POSIX path, relative to the repository, is at our paths."""
        return any(path == own or path.startswith(own + "/") for own in self.own_paths)


def load_pins(root: Path) -> Pins:
    """Read the pin file of the checkout at `root`.

    Raises:
        BuildError: the file is missing, or a key is missing or of the wrong type.
    """
    path = root / PIN_FILE
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"cannot read the pin file {path}: {error}") from error
    try:
        targets = {
            name: _target(name, table) for name, table in data["targets"].items()
        }
        return Pins(
            version=_text(data, "version"),
            fork_label=_text(data, "fork_label"),
            nixl=_text(data, "nixl"),
            own_paths=_texts(data, "own_paths"),
            targets=targets,
            source=_source(data.get("source", {})),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{path}: missing or malformed key {error}; compare it with the "
            "committed version (git diff)"
        ) from error


def _target(name: str, table: Mapping[str, Any]) -> TargetPin:
    wheels = tuple(
        WheelPin(file=file, sha256=_text(table["wheels"], file))
        for file in table["wheels"]
    )
    return TargetPin(
        name=name,
        distribution=_text(table, "distribution"),
        local_label=_text(table, "local_label"),
        dropped_requirements=_texts(table, "dropped_requirements"),
        wheels=wheels,
    )


def _source(table: Mapping[str, Any]) -> WheelPin | None:
    if not table:
        return None
    if len(table) != 1:
        raise TypeError(f"'source' (expected one file, found {sorted(table)})")
    (file,) = table
    return WheelPin(file=file, sha256=_text(table, file))


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise TypeError(f"{key!r} (expected text, found {value!r})")
    return value


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table[key]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{key!r} (expected a list of texts, found {value!r})")
    return tuple(value)
