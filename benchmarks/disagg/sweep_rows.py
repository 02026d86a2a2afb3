# SPDX-License-Identifier: Apache-2.0
"""The rows that a sweep leaves behind, and what a row must hold to be believed.

A row is the load generator's own JSON with ``kit`` added: label, point, settings
and the proof that the engines gave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep_points import LABELS, Length, Point, PointError, mode_of
from sweep_proof import CONNECTORS

FORMAT = 1
"""Raised when a field changes its meaning."""

METRICS = ("ttft", "tpot")

# What must be equal for rows to be compared, whatever they were measured with.
COMPARED = ("device", "model", "num_prompts", "prefix_len", "caches", "tp_size")


class RowError(ValueError):
    """A file is no row of this format; the text says what to do."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with one field of a row."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field} {self.text}"


@dataclass(frozen=True)
class Row:
    """One measured point."""

    path: Path
    document: Mapping[str, Any]
    label: str
    point: Point

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was measured."""
        found: Mapping[str, Any] = self.document["kit"].get("settings", {})
        return found

    def value(self, metric: str) -> float:
        """The median of ``ttft`` or ``tpot`` over the requests, in milliseconds."""
        return float(self.document[f"median_{metric}_ms"])


def write(
    folder: Path,
    label: str,
    point: Point,
    client: Mapping[str, Any],
    settings: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> Path:
    """Write a row, one whole file or none; returns the file."""
    kit = {
        "format": FORMAT,
        "label": label,
        "qps": point.qps,
        "input_len": str(point.input_len),
        "output_len": str(point.output_len),
        "iteration": point.iteration,
        "settings": dict(settings),
        "proof": dict(proof),
    }
    path = folder / f"{point.name(label)}.json"
    partial = path.with_suffix(".partial")
    text = json.dumps({**client, "kit": kit}, indent=1)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load(path: Path) -> Row:
    """Read one row.

    Raises:
        RowError: the file holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kit = document["kit"]
        if kit["format"] != FORMAT:
            raise RowError(
                f"{path}: format is {kit['format']}, expected {FORMAT}: it was "
                "written by another version of this kit; remove it and run again"
            )
        point = Point(
            float(kit["qps"]),
            Length.parse(kit["input_len"], "input_len"),
            Length.parse(kit["output_len"], "output_len"),
            int(kit["iteration"]),
        )
        label = kit["label"]
    except (OSError, KeyError, TypeError, ValueError, PointError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(
            f"{path}: kit is missing or broken ({error!r}), so this is no row of the "
            "sweep; remove the file and run run_sweep.sh again"
        ) from error
    if label not in LABELS:
        raise RowError(f"{path}: label is {label!r}, expected one of {LABELS}")
    return Row(path, document, label, point)


def load_all(folder: Path) -> list[Row]:
    """Read the rows of a folder, and nothing else that lies there.

    Raises:
        RowError: a file with a row's name is none.
    """
    paths = sorted(folder.glob("*_qps*_in*_out*_iter*.json"))
    return [load(path) for path in paths]


_Check = Callable[[Any, Mapping[str, Any]], str | None]
"""Says what was expected instead; ``None`` if the value is right."""


def _number(low: float, text: str, *, above: bool = False) -> _Check:
    def check(value: Any, _: Mapping[str, Any]) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return text
        right = math.isfinite(value) and (value > low if above else value >= low)
        return None if right else text

    return check


def _share(low: float = 0.0, *, above: bool = False) -> _Check:
    text = f"a share {'above' if above else 'from'} {low:g} up to 1"
    number = _number(low, text, above=above)

    def check(value: Any, facts: Mapping[str, Any]) -> str | None:
        return number(value, facts) or (text if value > 1 else None)

    return check


def _equal(other: str, text: str) -> _Check:
    def check(value: Any, facts: Mapping[str, Any]) -> str | None:
        expected = facts.get(other)
        if isinstance(value, (int, float)) and value == expected:
            return None
        return f"{expected} ({text})"

    return check


def _zero(value: Any, _: Mapping[str, Any]) -> str | None:
    return None if value == 0 and not isinstance(value, bool) else "0"


def _flag(value: Any, _: Mapping[str, Any]) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _connector(value: Any, facts: Mapping[str, Any]) -> str | None:
    expected = CONNECTORS.get(facts["mode"])
    return None if value == expected else f"{expected}, for mode {facts['mode']}"


_SOME = _number(0, "more than 0", above=True)
_CLIENT: Mapping[str, _Check] = {
    "completed": _equal("num_prompts", "all requests"),
    "failed": _zero,
    **{f"median_{metric}_ms": _SOME for metric in METRICS},
}
_ALWAYS: Mapping[str, _Check] = {
    "achieved_rate": _SOME,
    "connector": _connector,
    "block_size_p": _SOME,
    "prefix_caching_p": _flag,
    "prefix_hit_rate_p": _share(),
}
_HANDED_OVER: Mapping[str, _Check] = {
    "backends": lambda value, _: None if value else "names of NIXL backends",
    "block_size_d": _SOME,
    "prefix_caching_d": _flag,
    "prefix_hit_rate_d": _share(),
    "external_hit_rate_d": _share(above=True),
    "requests_handed_over": _SOME,
    "requests_ended": _equal("completed", "one hand-off for each request"),
    "handoffs_failed": _zero,
    "tokens_transferred": _SOME,
    "bytes_transferred": _SOME,
    "bytes_recorded": _equal(
        "bytes_transferred", "what metrics and hand-off records say must agree"
    ),
    "transfers": _SOME,
    "descriptors": _SOME,
    "descriptors_per_request": _SOME,
    "handoff_records": _SOME,
}
PROOF_FIELDS = (
    *_ALWAYS,
    *(name for name in _HANDED_OVER if name != "requests_ended"),
    "requests_not_needed",
)
"""Every row with a hand-off has all of these in its ``proof``."""


def problems(row: Row) -> list[Problem]:
    """What keeps a row from being believed; none if all is there and fits."""
    document, kit = row.document, row.document["kit"]
    proof = kit.get("proof")
    if not isinstance(proof, Mapping):
        return [Problem("kit.proof", "is missing")]
    mode = mode_of(row.label)
    facts = {**document, **proof, "mode": mode}
    found = _failing(_CLIENT, document, facts, "")
    found += _failing(_ALWAYS, proof, facts, "kit.proof.")
    if mode != "single":
        parts = [proof.get(n) for n in ("requests_handed_over", "requests_not_needed")]
        if not isinstance(parts[1], int):
            text = f"{_shown(proof, 'requests_not_needed')}, expected a count"
            found.append(Problem("kit.proof.requests_not_needed", text))
            parts[1] = 0
        ended = sum(part for part in parts if isinstance(part, int))
        extended = {**proof, "requests_ended": ended}
        found += _failing(_HANDED_OVER, extended, facts, "kit.proof.")
    if not isinstance(kit.get("settings"), Mapping):
        found.append(Problem("kit.settings", "is missing"))
    return found


def _failing(
    checks: Mapping[str, _Check],
    values: Mapping[str, Any],
    facts: Mapping[str, Any],
    prefix: str,
) -> list[Problem]:
    found = []
    for name, check in checks.items():
        expected = check(values.get(name), facts)
        if expected is not None:
            text = f"{_shown(values, name)}, expected {expected}"
            found.append(Problem(prefix + name, text))
    return found


def _shown(values: Mapping[str, Any], name: str) -> str:
    return f"is {values[name]!r}" if values.get(name) is not None else "is missing"


def refusals(rows: Sequence[Row]) -> list[str]:
    """Why rows may not be plotted together, naming file and field of each reason."""
    said = [f"{row.path}: {problem}" for row in rows for problem in problems(row)]
    return said or [*_different(rows), *_gaps(rows)]


def differing_settings(
    row: Row, settings: Mapping[str, Any], names: Iterable[str] | None = None
) -> list[str]:
    """The settings in which a row differs from others, with both values."""
    return [
        f"kit.settings.{name} is {row.settings.get(name)!r}, not {settings.get(name)!r}"
        for name in (settings if names is None else names)
        if row.settings.get(name) != settings.get(name)
    ]


def _different(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    return [
        f"{row.path}: {text} as in {first.path}"
        for row in rows[1:]
        for text in differing_settings(row, first.settings, COMPARED)
    ]


def _gaps(rows: Sequence[Row]) -> list[str]:
    labels = sorted({row.label for row in rows})
    wanted = {row.point for row in rows}
    present = {(row.label, row.point) for row in rows}
    folder = rows[0].path.parent
    return sorted(
        f"{folder / point.name(label)}.json: the row is missing; all modes need the "
        "same lists"
        for label in labels
        for point in wanted
        if (label, point) not in present
    )
