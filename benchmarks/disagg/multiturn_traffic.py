# SPDX-License-Identifier: Apache-2.0
"""What the multi-turn benchmark asks, and in which order it tries its settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

_T = TypeVar("_T")

MAX_TURNS_PER_RUN = 500
"""An engine tells of its latest 1024 hand-offs; a turn makes up to two."""


class TrafficError(ValueError):
    """Traffic that cannot be made; the text names option, value and remedy."""


@dataclass(frozen=True)
class Setting:
    """What is compared: P's prefix cache, and reading back what D keeps."""

    p_prefix_caching: bool
    bidirectional: bool

    @property
    def name(self) -> str:
        """Short and fit for a file's name."""
        caching, reading = _switch(self.p_prefix_caching), _switch(self.bidirectional)
        return f"pcache-{caching}_bidi-{reading}"

    def __str__(self) -> str:
        return (
            f"P's prefix cache {_switch(self.p_prefix_caching)}, "
            f"bidirectional {_switch(self.bidirectional)}"
        )


@dataclass(frozen=True)
class Traffic:
    """The conversations of one run; lengths are in tokens, times in seconds.

    Attributes:
        first_tokens: length of the first prompt.
        user_tokens: what the user adds in each later turn.
        answer_tokens: length of every answer.
        think: mean time between an answer's end and the next turn.
        token_range: prompts are drawn from these ids, the last one excluded.
    """

    conversations: int
    turns: int
    first_tokens: int
    user_tokens: int
    answer_tokens: int
    think: float
    token_range: tuple[int, int]
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--conversations", self.conversations, 1),
            ("--turns", self.turns, 1),
            ("--first-tokens", self.first_tokens, 1),
            ("--user-tokens", self.user_tokens, 1),
            ("--answer-tokens", self.answer_tokens, 1),
            ("--think", self.think, 0),
        ):
            if value < least:
                raise TrafficError(f"{option} is {value}, expected at least {least}")
        low, high = self.token_range
        if not 0 <= low < high:
            raise TrafficError(
                f"--token-range is {low} {high}, expected two ids of which the first "
                "is the lower one"
            )
        turns = self.conversations * self.turns
        if turns > MAX_TURNS_PER_RUN:
            raise TrafficError(
                f"--conversations times --turns is {turns}, expected at most "
                f"{MAX_TURNS_PER_RUN}: engines do not remember more hand-offs. Use "
                "more --repetitions of fewer turns"
            )

    def prompt_tokens(self, turn: int) -> int:
        """Length of the prompt of a turn, counted from 1."""
        return self.first_tokens + (turn - 1) * (self.user_tokens + self.answer_tokens)

    @property
    def longest_tokens(self) -> int:
        """Length of a whole conversation, with the last answer."""
        return self.prompt_tokens(self.turns) + self.answer_tokens


@dataclass(frozen=True)
class Conversation:
    """What one user says, and how long they wait before saying it."""

    number: int
    said: tuple[tuple[int, ...], ...]
    pauses: tuple[float, ...]


def conversations(
    traffic: Traffic, repetition: int, nonce: str = ""
) -> list[Conversation]:
    """The conversations of one repetition.

    They differ between repetitions and, where ``nonce`` does, also within one.
    """
    found = []
    for number in range(traffic.conversations):
        rng = random.Random(f"{traffic.seed} {repetition} {number} {nonce}")
        said = tuple(
            tuple(
                rng.randrange(*traffic.token_range)
                for _ in range(
                    traffic.first_tokens if turn == 0 else traffic.user_tokens
                )
            )
            for turn in range(traffic.turns)
        )
        # The first pauses spread the conversations' starts.
        first = traffic.think * number / traffic.conversations
        later = (
            traffic.think * rng.uniform(0.5, 1.5) for _ in range(traffic.turns - 1)
        )
        found.append(Conversation(number, said, (first, *later)))
    return found


def settings(
    p_prefix_caching: Sequence[bool], bidirectional: Sequence[bool]
) -> list[Setting]:
    """All combinations, in the order in which they are reported."""
    return [
        Setting(caching, reading)
        for caching, reading in product(p_prefix_caching, bidirectional)
    ]


def in_turn(choices: Sequence[_T], repetition: int) -> list[_T]:
    """The order of one repetition, counted from 0.

    Every setting comes first, last and after each other one in some repetition, so
    that neither a slow spell of the machine nor a neighbour favours one.
    """
    start = repetition % len(choices)
    order = [*choices[start:], *choices[:start]]
    return order[::-1] if repetition % 2 else order


def _switch(value: bool) -> str:
    return "on" if value else "off"
