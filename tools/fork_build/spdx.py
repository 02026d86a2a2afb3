# SPDX-License-Identifier: Apache-2.0
"""Checks that source files begin with the licence line: `python -m fork_build.spdx`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

HEADER = "SPDX-License-Identifier: Apache-2.0"
_COMMENTS = {
    ".py": "# ",
    ".sh": "# ",
    ".toml": "# ",
    ".yaml": "# ",
    ".yml": "# ",
    ".c": "// ",
    ".cc": "// ",
    ".cpp": "// ",
    ".h": "// ",
    ".hpp": "// ",
}
_NAMED = {"Makefile": "# ", "CMakeLists.txt": "# "}


def expected_line(path: Path, lines: list[str]) -> str | None:
    """The licence line that a file must have, or None where it needs none."""
    if comment := _COMMENTS.get(path.suffix) or _NAMED.get(path.name):
        return comment + HEADER
    if not path.suffix and lines and lines[0].startswith("#!"):
        return "# " + HEADER
    return None


def missing(paths: Iterable[Path]) -> list[Path]:
    """Files whose first line, or the second after `#!`, is not the licence line."""
    wrong = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        expected = expected_line(path, lines)
        position = 1 if lines and lines[0].startswith("#!") else 0
        # An empty file, such as a bare __init__.py, holds nothing to license.
        if expected and lines and lines[position : position + 1] != [expected]:
            wrong.append(path)
    return wrong


def main(arguments: list[str]) -> int:
    """Check the named files; return 1 where a header is missing."""
    wrong = missing(Path(argument) for argument in arguments)
    for path in wrong:
        print(f"{path}: the first line must be the comment `{HEADER}`")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
