# SPDX-License-Identifier: Apache-2.0
"""The points of a sweep: what is asked at each, and what their files are called."""

from __future__ import annotations

import re
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

LABELS = ("push", "pull", "pull-early", "pull-inline", "single")
"""What can be compared.

``pull-early`` is pull whose router chooses D before prefill, ``pull-inline`` is pull
with its transfers made on the forward thread, ``single`` is one engine without a
connector.
"""

T = TypeVar("T")

_LENGTH = re.compile(r"(\d+)(?:-(\d+))?")


class PointError(ValueError):
    """A sweep that cannot be run; the text names variable, value and remedy."""


def mode_of(label: str) -> str:
    """Which side moves the KV: ``push``, ``pull``, or ``single`` for nobody."""
    return label.split("-")[0]


@dataclass(frozen=True, order=True)
class Length:
    """A number of tokens, or any number between two of them with equal chance."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Length:
        """Read ``1024`` or ``1024-16384``.

        Raises:
            PointError: it is neither.
        """
        match = _LENGTH.fullmatch(text)
        if match:
            low = int(match[1])
            high = int(match[2] or low)
            if 1 <= low <= high:
                return cls(low, high)
        raise PointError(
            f"{name} holds {text!r}, expected lengths such as 1024, or 1024-16384 for "
            "lengths that are mixed evenly between the two"
        )

    @property
    def middle(self) -> int:
        """The mean length."""
        return (self.low + self.high) // 2

    @property
    def ratio(self) -> float:
        """How far it goes to both sides of the middle, as a share of it."""
        # The load generator rounds outwards: a hair less keeps within the limits.
        return max(0.0, (self.middle - self.low) / self.middle - 1e-9)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Point:
    """One measurement."""

    qps: float
    input_len: Length
    output_len: Length
    iteration: int

    def name(self, label: str) -> str:
        """Its files' name without suffix."""
        return (
            f"{label}_qps{self.qps:g}_in{self.input_len}_out{self.output_len}"
            f"_iter{self.iteration}"
        )

    @property
    def seed(self) -> int:
        """The same in all modes, and another one at every other point.

        So all modes get the same prompts, and no prompt is asked for twice.
        """
        key = f"{self.qps:g} {self.input_len} {self.output_len} {self.iteration}"
        return zlib.crc32(key.encode()) >> 1


def points(qps: str, input_lens: str, output_lens: str, iterations: int) -> list[Point]:
    """All points; every iteration goes through all of them once.

    Raises:
        PointError: a list is empty, names something twice, or cannot be read.
    """
    rates = _rates(qps)
    inputs = _lengths(input_lens, "INPUT_LENS")
    outputs = _lengths(output_lens, "OUTPUT_LENS")
    if iterations < 1:
        raise PointError(f"ITERATIONS is {iterations}, expected at least 1")
    return [
        Point(rate, input_len, output_len, iteration)
        for iteration, input_len, output_len, rate in product(
            range(1, iterations + 1), inputs, outputs, rates
        )
    ]


def _rates(text: str) -> list[float]:
    found = []
    for word in text.split():
        try:
            rate = float(word)
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf"):
            raise PointError(
                f"QPS_LIST holds {word!r}, expected requests per second such as 0.5"
            )
        found.append(rate)
    return _distinct(found, "QPS_LIST")


def _lengths(text: str, name: str) -> list[Length]:
    return _distinct([Length.parse(word, name) for word in text.split()], name)


def _distinct(found: list[T], name: str) -> list[T]:
    if not found:
        raise PointError(f"{name} is empty, expected values separated by blanks")
    if len(set(found)) < len(found):
        raise PointError(f"{name} names a value twice: {' '.join(map(str, found))}")
    return found


class Forecast:
    """How long the rest of a sweep will take, from what has been run of it."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._excess: list[float] = []

    def arrivals(self, point: Point) -> float:
        """Seconds within which the point's requests arrive, on average."""
        return self._requests / point.qps

    def note(self, point: Point, seconds: float) -> None:
        """A point has taken so long."""
        self._excess.append(seconds - self.arrivals(point))

    def left(self, remaining: Sequence[Point]) -> float | None:
        """Seconds that the remaining points will take; ``None`` before the first."""
        if not self._excess:
            return None
        excess = statistics.median(self._excess)
        return sum(max(0.0, self.arrivals(one) + excess) for one in remaining)


def duration(seconds: float) -> str:
    """For people: ``45 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"
