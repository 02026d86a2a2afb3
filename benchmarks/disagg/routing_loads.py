# SPDX-License-Identifier: Apache-2.0
"""The loads under which router settings are compared: what is sent when."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """One request, to be sent so many seconds after its load has begun."""

    at: float
    prompt_tokens: int
    answer_tokens: int


def bursts(rng: random.Random, options: argparse.Namespace) -> list[Planned]:
    """Bursts of requests, of which the same number has long answers in each."""
    planned = []
    for number in range(options.bursts):
        long = round(options.burst_size * options.long_share)
        answers = [options.long_answer] * long
        answers += [options.short_answer] * (options.burst_size - long)
        rng.shuffle(answers)
        for place, answer in enumerate(answers):
            at = number * options.gap + place * 0.01
            planned.append(Planned(at, options.prompt_tokens, answer))
    return planned


@dataclass(frozen=True)
class Occupied:
    """A decode engine that others keep busy, past the router, for a while.

    Args:
        engine: its number.
        begins, ends: in seconds after the load has begun.
    """

    engine: int
    begins: float
    ends: float


def arrivals(rng: random.Random, options: argparse.Namespace) -> list[Planned]:
    """Single requests at random moments, so many a second, as long as phases last."""
    planned = []
    at = rng.expovariate(options.rate)
    while at < options.phases * options.phase:
        long = rng.random() < options.long_share
        answer = options.long_answer if long else options.short_answer
        planned.append(Planned(at, options.prompt_tokens, answer))
        at += rng.expovariate(options.rate)
    return planned


def occupations(rng: random.Random, options: argparse.Namespace) -> list[Occupied]:
    """One decode engine after the other is occupied for a part of each phase."""
    first = rng.randrange(options.decode_engines)
    return [
        Occupied(
            (first + number) % options.decode_engines,
            number * options.phase,
            number * options.phase + options.occupied,
        )
        for number in range(options.phases)
        if options.background
    ]
