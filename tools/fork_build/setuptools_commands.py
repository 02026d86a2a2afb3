# SPDX-License-Identifier: Apache-2.0
"""The setuptools commands that make the wheel, the editable install and the sdist."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

from fork_build.checkout import distribution_files, own_files
from fork_build.native import compile_native, lay_native
from fork_build.overlay import unpack_for_wheel
from fork_build.prepare import Build


class BinaryDistribution(Distribution):
    """A distribution with compiled files: the base's, and ours where it can be made."""

    def has_ext_modules(self) -> bool:
        """Make wheels platform-specific."""
        return True


class BuildPython(build_py):
    """Lays the base into the checkout, or base and our files into a wheel."""

    build: ClassVar[Build]

    def run(self) -> None:
        """Editable: lay the tree. Otherwise fill the build folder without it."""
        if self.editable_mode:
            self.build.lay()
            lay_native(self.build.root)
            return
        library = Path(self.build_lib)
        shutil.rmtree(library, ignore_errors=True)
        library.mkdir(parents=True)
        unpack_for_wheel(self.build.pins, self.build.archive(), library)
        for name in own_files(self.build.root, self.build.pins):
            target = library / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.build.root / name, target)
        compile_native(self.build.root, library, library.parent)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Files in the build folder."""
        if self.editable_mode:
            return []
        return [str(path) for path in Path(self.build_lib).rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """No file of the build folder stands for one of the checkout."""
        return {}

    def get_source_files(self) -> list[str]:
        """Our files; the unpacked base is no source."""
        return own_files(self.build.root, self.build.pins)


class Wheel(bdist_wheel):
    """A wheel with the tag of the base wheel, whose binaries it carries."""

    def run(self) -> None:
        """Make the wheel and delete the build folder, which is as large as the base."""
        super().run()
        shutil.rmtree(self.get_finalized_command("build").build_base)

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform tag."""
        return BuildPython.build.wheel.tag


class SourceDistribution(sdist):
    """An sdist of exactly the files that belong to this repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Take our files instead of those that setuptools finds in the tree."""
        super().make_release_tree(base_dir, distribution_files(BuildPython.build.root))
