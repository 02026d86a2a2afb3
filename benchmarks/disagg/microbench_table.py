# SPDX-License-Identifier: Apache-2.0
"""Rows as a Markdown table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: the row's key, its heading, and decimals where it is a number."""

    key: str
    heading: str
    decimals: int | None = None

    def cell(self, row: Mapping[str, object]) -> str:
        """The row's value as it is printed; a dash where it has none."""
        value = row.get(self.key)
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float) and self.decimals is not None:
            return f"{value:,.{self.decimals}f}"
        return f"{value:,}" if isinstance(value, int) else str(value)


def render(
    title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, object]]
) -> str:
    """A titled table, its columns aligned."""
    cells = [[column.heading for column in columns]]
    cells += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) for cell, width in zip(line, widths, strict=True)
        )
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([f"### {title}", "", lines[0], rule, *lines[1:], ""])
