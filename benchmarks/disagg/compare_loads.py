# SPDX-License-Identifier: Apache-2.0
"""The loads of the comparison with the base: fixed here, for every machine alike.

Only the saturation point is a measurement: the first rung of a kind's ladder on
which a single engine's median TTFT is at least twice that of the lowest rung.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_TOKEN_ID = 3
ANSWER_TOKENS = 24
SATURATION_FACTOR = 2.0

_JITTER = 0.15


@dataclass(frozen=True)
class Kind:
    """A mix of prompt lengths, and the rates at which it can be asked for.

    Attributes:
        lengths: of the prompts in tokens, in turn.
        ladder: requests per second, ascending; the first one is the light load.
        light: requests in one run of the light load.
        busy: requests in one run of any other, enough for a queue to grow.
    """

    name: str
    lengths: tuple[int, ...]
    ladder: tuple[float, ...]
    light: int
    busy: int


KINDS: tuple[Kind, ...] = (
    Kind("short", (128,), (3.0, 6.0, 10.0, 14.0, 17.0, 20.0, 23.0, 27.0), 10, 20),
    Kind("long", (1536,), (0.8, 1.0, 1.2, 1.4, 1.6, 1.9, 2.2), 5, 8),
    Kind("mixed", (128, 512, 1536), (1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.6), 6, 9),
)


@dataclass(frozen=True)
class Load:
    """One kind at one rate.

    Attributes:
        rung: where on the kind's ladder the rate stands.
        saturated: whether it is the saturation point.
    """

    kind: Kind
    rung: int
    saturated: bool = False

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.kind.ladder[self.rung]

    @property
    def requests(self) -> int:
        """How many are sent in one run."""
        return self.kind.busy if self.rung else self.kind.light

    @property
    def name(self) -> str:
        """Short and unique."""
        level = "saturation" if self.saturated else "light"
        return f"{self.kind.name} {level}"


@dataclass(frozen=True)
class Ask:
    """One request of a load: when it is sent, after the load's start, and what."""

    number: int
    at: float
    prompt: tuple[int, ...]


def warm_up(kinds: Sequence[Kind]) -> Load:
    """Connects a pair of engines, and has the extremes of length computed once."""
    lengths = [length for kind in kinds for length in kind.lengths]
    return Load(Kind("warm-up", (min(lengths), max(lengths)), (1.0,), 2, 2), 0)


def asks(load: Load, seed: str, vocab: int) -> list[Ask]:
    """The requests of one run; equal seeds give equal requests to every system.

    Arrivals are evenly spaced but for a jitter, so that few requests make a steady
    load; no two prompts begin alike, so that no cache can know them.
    """
    rng = random.Random(f"{load.kind.name} {load.rung} {seed}")
    found = []
    for number in range(load.requests):
        place = number + rng.uniform(-_JITTER, _JITTER) if number else 0.0
        length = load.kind.lengths[number % len(load.kind.lengths)]
        prompt = tuple(rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(length))
        found.append(Ask(number, place / load.rate, prompt))
    return found


def saturation_rung(medians: Mapping[int, float]) -> int | None:
    """The rung at which the median TTFT has doubled, from each rung's median.

    ``None`` where it has not.
    """
    if not medians:
        return None
    light = medians[min(medians)]
    doubled = [r for r, ttft in medians.items() if ttft >= SATURATION_FACTOR * light]
    return min(doubled, default=None)
