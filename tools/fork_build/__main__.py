# SPDX-License-Identifier: Apache-2.0
"""Command line of the build: `python -m fork_build COMMAND`, used by the Makefile."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fork_build.checkout import stray_files
from fork_build.errors import BuildError
from fork_build.fetch import pip_command
from fork_build.install import install, make_environment
from fork_build.native import remove_native
from fork_build.overlay import remove
from fork_build.pins import REPOSITORY
from fork_build.prepare import Build
from fork_build.rebase import rebase


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="fork_build", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lay", help="fetch the base and lay it around our files")
    commands.add_parser("remove", help="remove the laid files of the base")
    commands.add_parser("check-tree", help="fail on files in vllm/ that git misses")
    installer = commands.add_parser(
        "install", help="install into a virtual environment"
    )
    installer.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    installer.add_argument("--extras", default="dev", help="comma-separated")
    rebaser = commands.add_parser("rebase", help="pin another base version")
    rebaser.add_argument("version", help="version of the base, such as 0.33.0")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    root = REPOSITORY
    match options.command:
        case "lay":
            Build.from_environment(root, os.environ).lay()
        case "remove":
            remove_native(root)
            print(f"removed {remove(root)} files of the base", file=sys.stderr)
        case "check-tree":
            problems = stray_files(root)
            for problem in problems:
                print(problem)
            if problems:
                print(
                    "list own files in `own_paths` of tools/fork_build/base.toml and "
                    "in .gitignore (see CONTRIBUTING.md), or delete them"
                )
            return 1 if problems else 0
        case "install":
            extras = [name for name in options.extras.split(",") if name]
            build = Build.from_environment(root, os.environ)
            install(build, options.venv, extras)
        case "rebase":
            python = make_environment(root / ".venv")
            rebase(root, options.version, pip_command(python))
    return 0


if __name__ == "__main__":
    sys.exit(main())
