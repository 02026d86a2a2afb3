# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and ratios over the rounds of the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compare_run import Result
from multiturn_stats import Spread

Value = Callable[[Result], float | None]

SINGLE_NAME = "single"
BASE_OF: Mapping[str, str] = {
    "our-push": "base-push",
    "our-pull": "base-pull",
    "our-pull-inline": "base-pull",
    "base-push-as-shipped": "base-push",
    "base-pull-as-shipped": "base-pull",
}
"""The row in the same mode that a row is compared with."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed, between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Rounds:
    """One value of each round, by system and load."""

    values: Mapping[tuple[str, str], Mapping[int, float]]

    def spread(self, system: str, load: str) -> Spread | None:
        """Over all rounds."""
        return Spread.of(list(self.values.get((system, load), {}).values()))

    def ratio(self, system: str, reference: str, load: str) -> Spread | None:
        """To another system in the same round, over all rounds that have both."""
        own = self.values.get((system, load), {})
        other = self.values.get((reference, load), {})
        return Spread.of([own[n] / other[n] for n in own if other.get(n, 0.0) > 0.0])

    def excess(self, system: str, load: str) -> Rounds:
        """By how much each system exceeds ``system`` in the same round."""
        floor = self.values.get((system, load), {})
        return Rounds(
            {
                key: {n: value - floor[n] for n, value in of.items() if n in floor}
                for key, of in self.values.items()
                if key[1] == load
            }
        )


def rounds(results: Sequence[Result], value: Value) -> Rounds:
    """A value of all results that have it."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for result in results:
        one = value(result)
        if one is not None:
            found.setdefault((result.system, result.load), {})[result.round] = one
    return Rounds(found)


def ttft(share: float) -> Value:
    """A quantile of the times to the first token."""
    return lambda result: _quantile([s.ttft for s in result.samples], share)


def tpot(result: Result) -> float | None:
    """The median time of each further token."""
    return _quantile([s.tpot for s in result.samples], 0.5)


def part(name: str) -> Value:
    """The median of one of a sample's times that only a pair of engines has."""
    return lambda result: _quantile(
        [t for s in result.samples if (t := getattr(s, name)) is not None], 0.5
    )


def output_rate(result: Result) -> float | None:
    """The decode engine's output tokens per second."""
    tokens = sum(len(s.answer) for s in result.samples)
    return tokens / result.seconds if result.seconds else None


def achieved_rate(result: Result) -> float | None:
    """Requests answered per second."""
    return len(result.samples) / result.seconds if result.seconds else None


def block_seconds(result: Result) -> float | None:
    """Block-seconds that the prefill engine held for each request."""
    return result.block_seconds / result.requests


def hooks(role: str) -> Value:
    """Thread time that the connector took of a forward thread, for each request."""
    return lambda result: _per_request(result.forward_hooks.get(role), result)


def hook_p99(role: str) -> Value:
    """The same in the worst of a hundred engine steps."""
    return lambda result: result.hook_p99.get(role)


def scheduler_hooks(result: Result) -> float | None:
    """Thread time that the connector took of the schedulers, for each request."""
    return _per_request(sum(result.scheduler_hooks.values()), result)


def forward_threads(result: Result) -> float | None:
    """CPU time of the forward threads, for each request."""
    return _per_request(sum(result.forward_threads.values()), result)


def worker_rest(result: Result) -> float | None:
    """CPU time of the workers' other threads, for each request."""
    return _per_request(sum(result.worker_rest.values()), result)


def cpu(result: Result) -> float | None:
    """CPU time of all engine processes, for each request."""
    return _per_request(sum(result.cpu.values()), result)


def counted(key: str, *roles: str) -> Value:
    """A counter of the engines, for each request."""
    return lambda result: _per_request(
        sum(result.counted[role][key] for role in roles if role in result.counted),
        result,
    )


def hit_rate(role: str, hits: str, queries: str) -> Value:
    """Tokens found, as a share of those looked for."""

    def rate(result: Result) -> float | None:
        told = result.counted.get(role)
        if told is None or not told[queries]:
            return None
        return told[hits] / told[queries]

    return rate


def moved_requests(result: Result) -> float | None:
    """Requests for which D's scheduler took tokens from P."""
    return float(sum(sample.moved_tokens > 0 for sample in result.samples))


def _per_request(total: float | None, result: Result) -> float | None:
    return None if total is None else total / result.requests


def _quantile(values: Sequence[float], share: float) -> float | None:
    return quantile(values, share) if values else None
