# SPDX-License-Identifier: Apache-2.0
"""From the environment to a verified wheel, and to a laid tree."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork_build.fetch import cache_directory, fetch_wheel, pip_command
from fork_build.overlay import is_laid, lay
from fork_build.pins import Pins, TargetPin, WheelPin, load_pins
from fork_build.target import choose_target, choose_wheel
from fork_build.wheel_file import BaseMetadata, base_metadata, requirement_name

TORCH_HINT = (
    "torch with a `+cpu` version is not on the general package index: add PyTorch's "
    "CPU wheel index to pip's settings (`--extra-index-url …/whl/cpu`, or "
    "PIP_EXTRA_INDEX_URL; see pytorch.org), then run the command again"
)


@dataclass(frozen=True)
class Build:
    """What one build works with."""

    root: Path
    pins: Pins
    target: TargetPin
    wheel: WheelPin
    cache: Path
    python: Path | None = None
    """The Python whose pip downloads; None means the running one."""

    @classmethod
    def from_environment(
        cls, root: Path, environ: Mapping[str, str] | None = None
    ) -> Build:
        """Read the pin file and choose target, wheel and cache folder."""
        environ = os.environ if environ is None else environ
        pins = load_pins(root)
        target = choose_target(pins, environ)
        return cls(root, pins, target, choose_wheel(target), cache_directory(environ))

    @property
    def version(self) -> str:
        """Version of our distribution."""
        return self.pins.fork_version(self.target)

    def archive(self) -> Path:
        """Path of the verified base wheel, fetched if need be."""
        pip = pip_command(self.python)
        return fetch_wheel(self.target, self.pins.version, self.wheel, self.cache, pip)

    def lay(self) -> bool:
        """Lay the base around our files; return whether work was done."""
        if is_laid(self.root, self.pins, self.wheel):
            return False
        done = lay(self.root, self.pins, self.wheel, self.archive())
        print(f"laid {self.wheel.file} into {self.root}", file=sys.stderr)
        return done

    def metadata(self) -> BaseMetadata:
        """The base's metadata with our changes to its requirements."""
        base = base_metadata(self.archive())
        dropped = {*self.target.dropped_requirements, "nixl"}
        requirements = tuple(
            line for line in base.requirements if requirement_name(line) not in dropped
        )
        extras = {
            extra: [line for line in lines if requirement_name(line) not in dropped]
            for extra, lines in base.extras.items()
        }
        nixl = f"nixl=={self.pins.nixl}"
        return BaseMetadata((*requirements, nixl), extras, base.entry_points)
