# SPDX-License-Identifier: Apache-2.0
"""What a comparison of router settings has found: percentiles, ratios, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Done:
    """One request's times, in seconds.

    ``gap`` is the longest one between two tokens of a stream beside it.
    """

    arm: str
    round: int
    prompt_tokens: int
    answer_tokens: int
    ttft: float
    total: float
    gap: float | None = None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def first_token(one: Done) -> float:
    """The time that is compared unless another is."""
    return one.ttft


def compare(
    done: Sequence[Done],
    arms: Sequence[str],
    percent: float,
    time: Callable[[Done], float] = first_token,
) -> dict[str, dict[str, float]]:
    """Per arm: the percentile's median over the rounds, their range, and the ratio.

    The ratio to the first arm is the median of those of the single rounds.
    """
    rounds = sorted({one.round for one in done})
    by_round = {
        arm: [
            percentile(
                [time(d) for d in done if (d.arm, d.round) == (arm, number)], percent
            )
            for number in rounds
        ]
        for arm in arms
    }
    found = {}
    for arm in arms:
        ratios = [
            own / first
            for own, first in zip(by_round[arm], by_round[arms[0]], strict=True)
        ]
        found[arm] = {
            "median": statistics.median(by_round[arm]),
            "least": min(by_round[arm]),
            "greatest": max(by_round[arm]),
            "ratio": statistics.median(ratios),
            "least_ratio": min(ratios),
            "greatest_ratio": max(ratios),
        }
    return found


def table(title: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines to print."""
    lines = [f"{title:<28}{'median':>9}{'least..greatest':>18}{'ratio (range)':>24}"]
    for arm, row in found.items():
        spread = f"{row['least'] * 1e3:.0f}..{row['greatest'] * 1e3:.0f}"
        span = f"{row['least_ratio']:.2f}..{row['greatest_ratio']:.2f}"
        ratio = f"{row['ratio']:.2f} ({span})"
        lines.append(
            f"  {arm:<26}{row['median'] * 1e3:>6.0f} ms{spread:>18}{ratio:>24}"
        )
    return lines


def report(
    load: str, done: Sequence[Done], arms: Sequence[str], counts: Mapping[str, float]
) -> list[str]:
    """What the comparison has found, as lines."""
    lines = []
    if load != "lengths":
        for percent in PERCENTILES:
            lines += table(f"p{percent} TTFT of a round", compare(done, arms, percent))
        for arm in arms:
            all_of = [one.ttft for one in done if one.arm == arm]
            shown = ", ".join(
                f"p{percent} {percentile(all_of, percent) * 1e3:.0f} ms"
                for percent in PERCENTILES
            )
            lines.append(f"{arm}: all {len(all_of)} requests: {shown}")
    else:
        for length in sorted({one.prompt_tokens for one in done}):
            some = [one for one in done if one.prompt_tokens == length]
            lines += table(f"{length} tokens, p50 TTFT", compare(some, arms, 50))
            if all(one.gap is not None for one in some):
                gaps = compare(some, arms, 50, lambda one: one.gap or 0.0)
                lines += table(f"{length} tokens, p50 gap", gaps)
    lines += [
        f"{series} {value:.0f}" for series, value in sorted(counts.items()) if value
    ]
    return lines
