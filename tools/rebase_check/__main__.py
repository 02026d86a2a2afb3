# SPDX-License-Identifier: Apache-2.0
"""Try another version of the base: `python -m rebase_check VERSION`.

Unpacks the sources of both versions, installs neither, and says which names and
signatures that we use differ, and which of our tests do not import.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from fork_build.checkout import distribution_files
from fork_build.errors import BuildError
from fork_build.fetch import cache_directory, pip_command
from fork_build.pins import REPOSITORY, load_pins
from fork_build.source import fetch_source, unpack_source
from rebase_check.collect import Collected, collect, lay_ours, this_python
from rebase_check.compare import Finding, compare, shown, touched_classes, unknown
from rebase_check.surface import Surface
from rebase_check.uses import uses_of

TESTS = "tests/v1/kv_connector"


def main(arguments: list[str] | None = None) -> int:
    """Run the check; return 0 where nothing has to be done."""
    parser = argparse.ArgumentParser(prog="rebase_check", description=__doc__)
    parser.add_argument("version", help="of the base, such as 0.33.0")
    parser.add_argument(
        "--no-tests", action="store_true", help="compare only; import no test"
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="rebase-check-") as folder:
            return _check(options.version, not options.no_tests, Path(folder))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(version: str, with_tests: bool, folder: Path) -> int:
    pins = load_pins(REPOSITORY)
    cache, pip = cache_directory(os.environ), pip_command()
    base_archive = fetch_source(pins.version, cache, pip, pins.source)
    other_archive = fetch_source(version, cache, pip)
    base = unpack_source(base_archive, folder / "base")
    other = unpack_source(other_archive, folder / "other")
    files = distribution_files(REPOSITORY)
    findings = differences(REPOSITORY, files, base, other)
    print(shown(findings, pins.version, version))
    collected = Collected(0, {})
    if with_tests:
        lay_ours(REPOSITORY, files, pins.own_paths, other)
        collected = collect(other, TESTS, this_python(), folder / "report")
        print(f"Files of tests that do not import: {len(collected.failed)}")
        for name, reason in sorted(collected.failed.items()):
            print(f"  {name}\n    {reason}")
        print(f"Tests that were found: {collected.tests}")
    urgent = [finding for finding in findings if finding.kind in {"removed", "changed"}]
    return 1 if urgent or collected.failed else 0


def differences(root: Path, files: list[str], base: Path, other: Path) -> list[Finding]:
    """Compare what our files use in two trees of sources.

    Raises:
        BuildError: the tree of the base does not have what they use.
    """
    uses = uses_of(
        {
            name: (root / name).read_text(encoding="utf-8")
            for name in files
            if name.endswith(".py")
        }
    )
    touched = touched_classes()
    before = Surface(base)
    if missing := unknown(uses, before, touched):
        raise BuildError(
            f"the pinned base has no {', '.join(missing)}: mend the import, or "
            "tools/rebase_check/touched.toml"
        )
    return compare(uses, before, Surface(other), touched)


if __name__ == "__main__":
    sys.exit(main())
