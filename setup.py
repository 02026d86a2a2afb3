# SPDX-License-Identifier: Apache-2.0
"""Builds `vllm` from the pinned base wheel and this checkout; see CONTRIBUTING.md."""

import sys
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from fork_build.errors import BuildError  # noqa: E402
from fork_build.prepare import TORCH_HINT, Build  # noqa: E402
from fork_build.setuptools_commands import (  # noqa: E402
    BinaryDistribution,
    BuildPython,
    SourceDistribution,
    Wheel,
)


def main() -> None:
    """Run setuptools with the base's metadata and our commands."""
    build = Build.from_environment(ROOT)
    BuildPython.build = build
    metadata = build.metadata()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own_extras: dict[str, list[str]] = settings["tool"]["fork-build"]["extras"]
    print(f"building vllm {build.version} on {build.wheel.file}")
    if any("+cpu" in line for line in metadata.requirements):
        print(f"if pip does not find torch: {TORCH_HINT}")
    readme = ROOT / "README.md"
    setup(
        version=build.version,
        long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
        long_description_content_type="text/markdown",
        packages=["vllm"],
        include_package_data=False,
        install_requires=list(metadata.requirements),
        extras_require={**metadata.extras, **own_extras},
        entry_points=metadata.entry_points,
        distclass=BinaryDistribution,
        cmdclass={
            "build_py": BuildPython,
            "bdist_wheel": Wheel,
            "sdist": SourceDistribution,
        },
    )


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"error: {error}")
