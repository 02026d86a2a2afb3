# SPDX-License-Identifier: Apache-2.0
"""Compares what we use in two trees of the base."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rebase_check.surface import Definition, Surface
from rebase_check.uses import Uses

TOUCHED_FILE = Path(__file__).with_name("touched.toml")
_SHOWN_FILES = 3


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        kind: `removed`, `changed`, `types` (annotations alone) or `new`.
        name: dotted name in the base.
        before: what it was there.
        after: what it is in the other version, or where it has gone.
        files: of ours that use it.
    """

    kind: str
    name: str
    before: str
    after: str
    files: tuple[str, ...]


def touched_classes(path: Path = TOUCHED_FILE) -> list[tuple[str, str]]:
    """Modules and names of the classes that we are given objects of."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))["classes"]
    return [(module, name) for module, names in table.items() for name in names]


def compare(
    uses: Uses,
    base: Surface,
    other: Surface,
    touched: Iterable[tuple[str, str]] = (),
) -> list[Finding]:
    """What differs in names that we use, sorted by kind and name."""
    names = dict(uses.names)
    for place in touched:
        names.setdefault(place, set())
    found: dict[tuple[str, str], Finding] = {}
    for (module, name), files in names.items():
        for finding in _compare_name(uses, base, other, module, name, files):
            found.setdefault((finding.kind, finding.name), finding)
    return [found[key] for key in sorted(found)]


def unknown(
    uses: Uses, base: Surface, touched: Iterable[tuple[str, str]] = ()
) -> list[str]:
    """Names that the base itself does not have, by this way of reading it."""
    places = [*uses.names, *touched]
    return sorted(
        f"{module}.{name}".rstrip(".")
        for module, name in places
        if base.find(module, name) is None
    )


def _compare_name(
    uses: Uses, base: Surface, other: Surface, module: str, name: str, files: set[str]
) -> Iterator[Finding]:
    before = base.find(module, name)
    if before is None:
        return
    dotted = f"{module}.{name}".rstrip(".")
    listed = tuple(sorted(files))
    after = other.find(module, name)
    if after is None:
        yield Finding("removed", dotted, "", _gone(other, module, name), listed)
        return
    overridden = uses.overrides.get((module, name), {})
    for member in _members_in_use(uses, before, overridden):
        where = tuple(sorted(overridden.get(member, files)))
        label = f"{dotted}.{member}" if member else dotted
        old, new = before.members[member], after.members.get(member)
        if new is None:
            yield Finding("removed", label, old.full, "", where)
        elif old.shape != new.shape:
            yield Finding("changed", label, old.full, new.full, where)
        elif old.full != new.full:
            yield Finding("types", label, old.full, new.full, where)
    if overridden:
        for member in after.members.keys() - before.members.keys():
            if not member.startswith("_"):
                full = after.members[member].full
                yield Finding("new", f"{dotted}.{member}", "", full, listed)


def _members_in_use(
    uses: Uses, definition: Definition, overridden: Iterable[str]
) -> list[str]:
    if definition.kind != "class":
        return sorted(definition.members)
    wanted = {*uses.attributes, *overridden, "__init__"}
    return sorted(wanted & definition.members.keys())


def _gone(other: Surface, module: str, name: str) -> str:
    places = other.where_defined(name) if name else []
    if places:
        return f"now in {', '.join(places)}"
    if not other.has_module(module):
        return f"the module {module} is gone"
    return ""


def shown(findings: Iterable[Finding], base: str, other: str) -> str:
    """Findings as text for a person."""
    titles = {
        "removed": "Gone: must be replaced",
        "changed": "Called otherwise, or with another default or value",
        "types": "Other annotations only",
        "new": "New in classes that we override: to be looked at",
    }
    lines = []
    listed = list(findings)
    for kind, title in titles.items():
        group = [finding for finding in listed if finding.kind == kind]
        lines.append(f"{title}: {len(group)}")
        for finding in group:
            lines.append(f"  {finding.name}{_files(finding.files)}")
            if finding.before:
                lines.append(f"    {base}: {finding.before}")
            if finding.after:
                lines.append(f"    {other}: {finding.after}")
    return "\n".join(lines)


def _files(files: tuple[str, ...]) -> str:
    if not files:
        return ""
    more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
    return f" ({', '.join(files[:_SHOWN_FILES])}{more})"
