# SPDX-License-Identifier: Apache-2.0
"""The page that an operator reads, as Markdown that is readable as plain text too."""

from __future__ import annotations

from collections.abc import Sequence

from verify_result import Check, Moved, Report, Status

MAX_DETAILS = 12
"""Lines of one check that are shown; the page should stay one."""

_MEANING = {
    Status.PASS: "all checks passed",
    Status.FAIL: "at least one check failed",
    Status.UNKNOWN: "nothing failed, but not all could be checked",
}


def render(report: Report) -> str:
    """The whole page."""
    lines = [f"# {report.title}: {report.status}", ""]
    lines += [f"{_MEANING[report.status].capitalize()}.", ""]
    rows = [(str(c.status), c.name, c.said) for c in report.checks]
    lines += _table(("result", "check", "seen"), rows)
    for status, title in (
        (Status.FAIL, "What failed, and what to do"),
        (Status.UNKNOWN, "What was not checked"),
    ):
        chosen = [check for check in report.checks if check.status is status]
        if chosen:
            lines += ["", f"## {title}"]
            for check in chosen:
                lines += _explained(check)
    noted = [c for c in report.checks if c.status is Status.PASS and c.details]
    if noted:
        lines += ["", "## Notes", ""]
        for check in noted:
            lines += [f"- {check.name}: {line}" for line in _shown(check.details)]
    if report.moved:
        lines += ["", "## What was moved", ""]
        heads = (
            "prompts",
            "of",
            "tokens",
            "answers",
            "bytes",
            "descriptors",
            "D waited",
        )
        kinds = [_moved_row(moved) for moved in report.moved]
        # What is not known of any kind needs no columns.
        columns = 7 if any(moved.bytes is not None for moved in report.moved) else 4
        lines += _table(heads[:columns], [row[:columns] for row in kinds])
    if report.facts:
        lines += ["", "## What was verified", ""]
        lines += [f"- {name}: {value}" for name, value in report.facts]
    if report.repeat:
        lines += ["", f"The same prompts again: `{report.repeat}`"]
    return "\n".join(lines) + "\n"


def _explained(check: Check) -> list[str]:
    lines = ["", f"**{check.name}**: {check.said}"]
    if check.details:
        lines += ["", *(f"- {line}" for line in _shown(check.details))]
    if check.remedy:
        lines += ["", check.remedy]
    return lines


def _shown(details: Sequence[str]) -> list[str]:
    if len(details) <= MAX_DETAILS:
        return list(details)
    left = len(details) - MAX_DETAILS
    return [*details[:MAX_DETAILS], f"and {left} more"]


def _moved_row(moved: Moved) -> tuple[str, ...]:
    each = moved.prompts
    return (
        moved.kind,
        str(each),
        f"{moved.tokens:,}",
        moved.answers,
        "?" if moved.bytes is None else f"{moved.bytes:,}",
        _descriptors(moved),
        "?" if moved.seconds is None else f"{1e3 * moved.seconds / each:.0f} ms each",
    )


def _descriptors(moved: Moved) -> str:
    if moved.descriptors is None:
        return "?"
    text = f"{moved.descriptors / moved.prompts:.1f} each"
    if moved.pages is not None:
        text += f" for {moved.pages / moved.prompts:.1f} pages"
    return text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_cell(text) for text in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    # The last column is free text: padding it makes every line as long as the longest.
    widths[-1] = len(cells[0][-1])

    def line(row: Sequence[str]) -> str:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return [line(cells[0]), rule, *map(line, cells[1:])]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
