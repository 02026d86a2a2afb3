# SPDX-License-Identifier: Apache-2.0
"""What a verification found, check by check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "NOT CHECKED"


class Unchecked(Exception):
    """A check cannot be made here; the text says why and what would make it."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was checked, in a few words.
        said: what was seen, in one line.
        details: more lines, such as each answer that differs.
        remedy: what to do about it, unless it passed.
    """

    name: str
    status: Status
    said: str
    details: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Moved:
    """What was moved for one kind of prompt.

    Attributes:
        tokens: of all its prompts.
        answers: how they compare with the reference, in a few words.
        bytes, descriptors, seconds: of all its hand-offs; ``None`` where the engines
            do not tell them for each request.
        pages: blocks times regions, as many descriptors as there would be if nothing
            were merged; ``None`` if not known.
    """

    kind: str
    prompts: int
    tokens: int
    answers: str
    bytes: int | None = None
    descriptors: int | None = None
    seconds: float | None = None
    pages: int | None = None


@dataclass
class Report:
    """All of it. ``facts`` are lines about the engines that nothing was judged by."""

    title: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    repeat: str = ""

    def add(
        self,
        name: str,
        problems: Sequence[str],
        said: str,
        remedy: str,
        details: Sequence[str] = (),
    ) -> None:
        """A check that fails if there are ``problems``, which are then what is said."""
        if not problems:
            self.checks.append(Check(name, Status.PASS, said, tuple(details)))
            return
        lines = (*problems[1:], *details)
        self.checks.append(Check(name, Status.FAIL, problems[0], lines, remedy))

    def unknown(self, name: str, why: str, remedy: str = "") -> None:
        """A check that could not be made."""
        self.checks.append(Check(name, Status.UNKNOWN, why, (), remedy))

    @property
    def status(self) -> Status:
        """The worst of all checks."""
        found = {check.status for check in self.checks}
        if Status.FAIL in found:
            return Status.FAIL
        return Status.UNKNOWN if Status.UNKNOWN in found or not found else Status.PASS

    @property
    def exit_status(self) -> int:
        """0: all passed; 1: one failed; 2: none failed, but not all could be made."""
        return {Status.PASS: 0, Status.FAIL: 1, Status.UNKNOWN: 2}[self.status]
