# SPDX-License-Identifier: Apache-2.0
"""What the demo prints: loading progress, one paragraph a request, the table."""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from pd_client import Answer, Ask
from pd_processes import Stage

_QUIET_INTERVAL_S = 5.0
_LINE_WIDTH = 110
_SHOWN_CHARACTERS = 150


@dataclass(frozen=True)
class Moved:
    """What one request moved between the engines.

    ``seconds`` is the time from the end of its prefill to the first step of its
    decode, where anything was moved.
    """

    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Result:
    """One request's outcome; ``error`` is set where there is no answer."""

    ask: Ask
    answer: Answer | None
    error: str = ""
    moved: Moved | None = None
    equal: bool | None = None


@dataclass
class Round:
    """All results of one set-up; ``leftovers`` names blocks still in use."""

    name: str
    results: list[Result] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def succeeded(self) -> bool:
        """Whether every answer came, was equal, and nothing is left in use.

        Where requests are handed off, KV must have been moved too.
        """
        moved = [one.moved.bytes for one in self.results if one.moved is not None]
        return (
            bool(self.results)
            and not self.leftovers
            and (not moved or sum(moved) > 0)
            and all(
                one.answer is not None and one.equal is not False
                for one in self.results
            )
        )


class ProgressLine:
    """Shows how far loading is: one changing line, or a line now and then."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._changing = stream.isatty()
        self._next_at = 0.0
        self._finished: set[str] = set()

    def show(self, stages: Sequence[Stage]) -> None:
        """Show the stages; a server that is ready gets a line that stays."""
        for stage in stages:
            if stage.ready and stage.name not in self._finished:
                self._finished.add(stage.name)
                self._put(f"  {stage.name}: ready after {stage.seconds:.0f} s", True)
        waiting = [stage for stage in stages if not stage.ready]
        if not waiting:
            return
        seconds = max(stage.seconds for stage in waiting)
        room = (_LINE_WIDTH - 10) // len(waiting) - 3
        texts = [
            textwrap.shorten(f"{stage.name}: {stage.text}", room, placeholder="…")
            for stage in waiting
        ]
        line = f"  {seconds:4.0f} s  " + " | ".join(texts)
        if self._changing:
            self._put(line, False)
        elif seconds >= self._next_at:
            self._next_at = seconds + _QUIET_INTERVAL_S
            self._put(line, True)

    def _put(self, line: str, stays: bool) -> None:
        if self._changing:
            end = "\n" if stays else ""
            self._stream.write(f"\r{line[:_LINE_WIDTH]:<{_LINE_WIDTH}}{end}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def after_prefill(sender: dict[str, Any], receiver: dict[str, Any]) -> float:
    """Seconds from the end of prefill to the first step of decode.

    Both engines run on this host, so their times of day are the same clock.
    """
    ended: float = sender["queued_at"] + sender["stages"]["prefill_ended"]
    began: float = receiver["queued_at"] + receiver["stages"]["first_step"]
    return began - ended


def print_result(number: int, count: int, result: Result) -> None:
    """Print one request and its answer."""
    answer = result.answer
    if answer is None:
        print(f"  {number}/{count} {result.ask.title}: FAILED: {result.error}")
        return
    print(
        f"  {number}/{count} {result.ask.title}, {answer.prompt_tokens} prompt tokens: "
        f"{_shortened(answer.text)}"
    )
    print(f"      {', '.join(_facts(result, answer))}", flush=True)


def table(rounds: Sequence[Round]) -> str:
    """Return the closing table, one column for each set-up."""
    rows = [["", *(one.name for one in rounds)]]
    rows.append(["median TTFT", *(_median(one, "ttft") for one in rounds)])
    rows.append(["median TPOT", *(_median(one, "tpot") for one in rounds)])
    rows.append(["median hand-off", *(_median_handoff(one) for one in rounds)])
    rows += [
        [f"{unit} moved", *(_total(one, unit) for one in rounds)]
        for unit in ("tokens", "bytes", "descriptors")
    ]
    rows.append(["equal answers", *(_equal(one) for one in rounds)])
    rows.append(["blocks left in use", *(_leftovers(one) for one in rounds)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("   ".join(cells))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _facts(result: Result, answer: Answer) -> list[str]:
    facts = []
    if answer.ttft is None:
        facts.append(f"whole answer after {_milliseconds(answer.total)}")
    else:
        facts.append(f"TTFT {_milliseconds(answer.ttft)}")
    if result.moved is not None:
        facts.append(f"{result.moved.tokens:,} tokens moved")
        facts.append(f"{result.moved.bytes:,} bytes")
        facts.append(f"{result.moved.descriptors:,} descriptors")
        if result.moved.seconds is not None:
            facts.append(f"hand-off {_milliseconds(result.moved.seconds, 1)}")
    if result.equal is not None:
        facts.append(
            "same text as the single engine" if result.equal else "DIFFERENT TEXT"
        )
    return facts


def _shortened(text: str) -> str:
    shown = repr(text)[1:-1]
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 1] + "…"
    return f'"{shown}"'


def _milliseconds(seconds: float, digits: int = 0) -> str:
    return f"{seconds * 1000:,.{digits}f} ms"


def _median_handoff(one: Round) -> str:
    values = [
        result.moved.seconds
        for result in one.results
        if result.moved is not None and result.moved.seconds is not None
    ]
    return _milliseconds(statistics.median(values), 1) if values else "-"


def _median(one: Round, field_name: str) -> str:
    answers = [result.answer for result in one.results if result.answer is not None]
    values = [getattr(answer, field_name) for answer in answers]
    known = [value for value in values if value is not None]
    return _milliseconds(statistics.median(known)) if known else "-"


def _total(one: Round, unit: str) -> str:
    moved = [result.moved for result in one.results if result.moved is not None]
    return f"{sum(getattr(each, unit) for each in moved):,}" if moved else "-"


def _equal(one: Round) -> str:
    compared = [result for result in one.results if result.equal is not None]
    if not compared and one.succeeded():
        return "reference"
    return f"{sum(result.equal is True for result in compared)} of {len(one.results)}"


def _leftovers(one: Round) -> str:
    if all(result.moved is None for result in one.results):
        return "-"
    return "none" if not one.leftovers else f"on {len(one.leftovers)} engine(s)"
