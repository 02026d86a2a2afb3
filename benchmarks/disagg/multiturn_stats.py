# SPDX-License-Identifier: Apache-2.0
"""Medians and spreads of the multi-turn benchmark's runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from multiturn_records import Run, Turn
from multiturn_traffic import Setting

TIMES = ("ttft", "total", "prefill", "transfer", "compute", "waiting")
COUNTS = ("prompt_tokens", "tokens_computed", "tokens_cached", "tokens_read")


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of one value over the repetitions."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """``None`` where there are no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def as_json(self) -> dict[str, float]:
        """For a document."""
        return {
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "count": self.count,
        }


@dataclass(frozen=True)
class Group:
    """All repetitions of one setting in one mode."""

    mode: str
    setting: Setting
    runs: tuple[Run, ...]

    def turns(self) -> list[int]:
        """The turns that were served at least once."""
        return sorted({turn.turn for run in self.runs for turn in run.turns})

    def spread(self, turn: int, value: str) -> Spread | None:
        """A value of one turn: over the runs, of each run's median conversation."""
        per_run = []
        for run in self.runs:
            found = _values(run.turns, turn, value)
            if found:
                per_run.append(statistics.median(found))
        return Spread.of(per_run)

    def at_last(self, value: str) -> dict[int, float]:
        """Each repetition's median of a value in the last turn."""
        last = self.turns()[-1]
        found = {run.repetition: _values(run.turns, last, value) for run in self.runs}
        return {
            repetition: statistics.median(values)
            for repetition, values in found.items()
            if values
        }


def groups(runs: Iterable[Run]) -> list[Group]:
    """Runs by mode and setting, in the order of reports."""

    def key(run: Run) -> tuple[bool, bool, bool]:
        setting = run.setting
        return (
            run.mode != "push",
            setting.p_prefix_caching,
            setting.bidirectional,
        )

    found = []
    for _, same in groupby(sorted(runs, key=key), key):
        members = tuple(sorted(same, key=lambda run: run.repetition))
        found.append(Group(members[0].mode, members[0].setting, members))
    return found


@dataclass(frozen=True)
class Gain:
    """How many times lower TTFT is in the last turn with bidirectional on.

    ``of_medians`` compares the medians; ``paired`` is over the repetitions, each of
    which compares its own two runs.
    """

    mode: str
    p_prefix_caching: bool
    prompt_tokens: float
    of_medians: float
    paired: Spread


def gains(found: Sequence[Group]) -> list[Gain]:
    """The gain for every mode and prefix-cache setting that was run both ways."""
    return list(_gains(found))


def _gains(found: Sequence[Group]) -> Iterator[Gain]:
    for on in found:
        if not on.setting.bidirectional:
            continue
        off_setting = Setting(on.setting.p_prefix_caching, bidirectional=False)
        off = next(
            (g for g in found if (g.mode, g.setting) == (on.mode, off_setting)), None
        )
        if off is None or not off.turns() or off.turns() != on.turns():
            continue
        without, with_it = off.at_last("ttft"), on.at_last("ttft")
        paired = Spread.of(
            [without[rep] / with_it[rep] for rep in without if rep in with_it]
        )
        length = on.spread(on.turns()[-1], "prompt_tokens")
        if paired is None or length is None:
            continue
        yield Gain(
            on.mode,
            on.setting.p_prefix_caching,
            length.median,
            statistics.median(without.values()) / statistics.median(with_it.values()),
            paired,
        )


def differing_conversations(runs: Iterable[Run]) -> tuple[int, int]:
    """Conversations whose answers differ from another setting's, and those compared.

    Both modes count as settings. The first setting that was run is the reference.
    """
    reference: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    compared = differing = 0
    for run in sorted(runs, key=lambda run: run.started_at):
        if not run.comparable:
            continue
        for number in sorted({turn.conversation for turn in run.turns}):
            answers = [t.answer for t in run.turns if t.conversation == number]
            place = (run.repetition, number)
            if place not in reference:
                reference[place] = answers
                continue
            compared += 1
            both = zip(answers, reference[place], strict=False)
            differing += any(one != other for one, other in both)
    return differing, compared


def most_excess(group: Group) -> int | None:
    """Most tokens that P computed in a later turn beyond the new ones.

    ``None`` where P did not tell, or there is no later turn.
    """
    excess = [
        turn.tokens_computed - turn.new_tokens
        for run in group.runs
        for turn in run.turns
        if turn.turn > 1 and turn.tokens_computed is not None
    ]
    return max(excess, default=None)


def summary(runs: Sequence[Run], allowed_excess: int | None) -> dict[str, Any]:
    """All of it as one document.

    ``allowed_excess`` is how many tokens P may compute beyond the new ones with
    bidirectional on, if that is known: a block and the threshold.
    """
    found = groups(runs)
    differing, compared = differing_conversations(runs)
    return {
        "settings": [_describe(group) for group in found],
        "gains": [
            {
                "mode": gain.mode,
                "p_prefix_caching": gain.p_prefix_caching,
                "prompt_tokens": gain.prompt_tokens,
                "ttft_off_over_on": gain.of_medians,
                "paired": gain.paired.as_json(),
            }
            for gain in gains(found)
        ],
        "allowed_excess": allowed_excess,
        "conversations_compared": compared,
        "conversations_differing": differing,
        "errors": [error for run in runs for error in run.errors],
    }


def _describe(group: Group) -> dict[str, Any]:
    prompts = _sum(group, "prompt_tokens")
    rate = Spread.of([run.turns_per_second for run in group.runs])
    load = Spread.of([run.load_average for run in group.runs])
    outcomes = [turn.read_outcome for run in group.runs for turn in run.turns]
    return {
        "mode": group.mode,
        "p_prefix_caching": group.setting.p_prefix_caching,
        "bidirectional": group.setting.bidirectional,
        "repetitions": len(group.runs),
        "turns_per_second": None if rate is None else rate.as_json(),
        "load_average": None if load is None else load.as_json(),
        "share_cached_on_p": _share(_sum(group, "tokens_cached"), prompts),
        "share_read_from_d": _share(_sum(group, "tokens_read"), prompts),
        "read_outcomes": {
            str(outcome): outcomes.count(outcome)
            for outcome in sorted(set(outcomes), key=str)
        },
        "most_excess_tokens": most_excess(group),
        "turns": [
            {
                "turn": turn,
                **{
                    value: None if spread is None else spread.as_json()
                    for value in (*COUNTS, *TIMES)
                    for spread in [group.spread(turn, value)]
                },
            }
            for turn in group.turns()
        ],
    }


def _values(turns: Iterable[Turn], number: int, value: str) -> list[float]:
    found = [getattr(turn, value) for turn in turns if turn.turn == number]
    return [one for one in found if one is not None]


def _sum(group: Group, value: str) -> int | None:
    found = [getattr(turn, value) for run in group.runs for turn in run.turns]
    return None if None in found else sum(found)


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
