# SPDX-License-Identifier: Apache-2.0
"""Lay this repository's files over upstream's tree, as a branch for a pull request.

    python tools/export_patch.py --vllm DIR [--series]

DIR is a checkout of upstream at the base's tag, or its source distribution, unpacked.
Without --series the branch is one commit. See docs/design/upstream.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.pins import REPOSITORY
from patch_export.errors import ExportError
from patch_export.export import lay
from patch_export.target import Target


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, metavar="DIR")
    parser.add_argument("--series", action="store_true", help="a commit per part")
    parser.add_argument("--branch", default="nixl-handoff", help="name of the branch")
    parser.add_argument("--signoff", metavar="'NAME <MAIL>'", help="else git's user")
    options = parser.parse_args(arguments)
    try:
        target = Target(options.vllm)
        identity = target.identity(options.signoff)
        count = lay(REPOSITORY, target, options.branch, options.series, identity)
    except (BuildError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    where = f"git -C {target.root}"
    print(f"{count} commit(s) on the branch {options.branch} of {target.root}")
    print(f"see them:   {where} log --stat -{count} {options.branch}")
    print(f"as patches: {where} format-patch -{count} {options.branch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
