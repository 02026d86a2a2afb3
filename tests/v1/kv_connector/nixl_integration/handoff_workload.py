# SPDX-License-Identifier: Apache-2.0
"""The requests of the distributed tests and the answers that are right for them.

Everything is drawn from fixed seeds. A single engine answers all of it once; a
test then compares what a pair of engines answers, token for token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from handoff_engines import BLOCK_SIZE, MAX_BATCHED_TOKENS, SPEC
from tiny_model import SPECIAL_TOKENS, random_prompt, tiny_model

Tokens = tuple[int, ...]

MAX_TOKENS = 16
MAX_PROMPT = 3000
SERVED_REQUESTS = 200
TIE_LOGITS = 1e-4
"""Logits closer than this may change places with the order of additions."""
TIES_PER_ANSWERS = 1 / 500


@dataclass(frozen=True)
class Ask:
    """One greedy completion."""

    prompt: Tokens
    max_tokens: int = MAX_TOKENS
    stream: bool = False


def _lengths_of_note() -> list[int]:
    near = [
        BLOCK_SIZE,
        2 * BLOCK_SIZE,
        8 * BLOCK_SIZE,
        MAX_BATCHED_TOKENS,
        2 * MAX_BATCHED_TOKENS,
    ]
    around = [length + delta for length in near for delta in (-1, 0, 1)]
    return [1, 2, 5, *around, MAX_PROMPT - 1, MAX_PROMPT]


@cache
def served() -> tuple[Ask, ...]:
    """The requests of the main test: all kinds of prompts, in random order."""
    rng = random.Random("served")
    prompts = [tuple(random_prompt(n, rng, SPEC)) for n in _lengths_of_note()]
    trunks = [tuple(random_prompt(n, rng, SPEC)) for n in (40, 64, 250, 512, 1100)]
    while len(prompts) < SERVED_REQUESTS:
        length = round(math.exp(rng.uniform(0, math.log(MAX_PROMPT))))
        kind = rng.random()
        if kind < 0.3:
            # A shared beginning, cut anywhere, with an end of its own.
            trunk = rng.choice(trunks)
            shared = trunk[: rng.choice((len(trunk), rng.randint(1, len(trunk))))]
            rest = max(1, min(length, MAX_PROMPT - len(shared)))
            prompts.append(shared + tuple(random_prompt(rest, rng, SPEC)))
        elif kind < 0.4:
            prompts.append(rng.choice(prompts))
        else:
            prompts.append(tuple(random_prompt(length, rng, SPEC)))
    rng.shuffle(prompts)
    return tuple(
        Ask(prompt, rng.choice((1, 2, 8, MAX_TOKENS)), stream=rng.random() < 0.4)
        for prompt in prompts
    )


# Prompts of one test are unknown to the caches when that test begins.
_FRESH: dict[str, tuple[int, ...]] = {
    "moved": (1, 7, 32, 33, 64, 100, 500, 777, 1200),
    "several": (3, 50, 96, 700),
    "chat": (9, 64, 300),
    "disconnect": tuple([20, 300, 900, 1500, 2200, 3000] * 5),
    "legs": tuple([1200, 2000, 2600, 3000] * 4),
    "late": (2500, 2600, 2700),
    "preempted": (2900,) * 6,
    "beside": (400,) * 4,
    "full": (3000, 2900, 2800, 2700, 2600, 2500, 2400, 2300),
    "crossed": (3000, 2950, 2900, 2850, 2800, 2750),
    "cached": (100, 97, 640),
    "plain_router": (5, 200, 1000),
    "other_routers": tuple([40, 900] * 6),
    "invalid": tuple(range(50, 90)),
    "foreign": (40, 120, 600),
    "multi": tuple([1, 31, 32, 33, 200, 600, 1500, 3000] * 4),
    "spoilt": tuple(range(40, 1240, 60)),
    "unspoilt": (45, 400),
    "idle": (60,),
    "after": tuple(range(30, 62)),
}


@cache
def fresh(group: str) -> tuple[Tokens, ...]:
    """The prompts of a test, by its name in the table above."""
    rng = random.Random(group)
    return tuple(tuple(random_prompt(n, rng, SPEC)) for n in _FRESH[group])


RANKS = (1, 31, 64, 100, 600, 1300)
"""Lengths of the prompts for engines of several ranks, which are slow here."""


def ranks_prompts(case: str) -> tuple[Tokens, ...]:
    """Prompts for engines of several ranks, unknown to the caches in each case.

    No single engine is asked for the answers.
    """
    rng = random.Random(f"ranks {case}")
    return tuple(tuple(random_prompt(n, rng, SPEC)) for n in RANKS)


def answers_without_engine(
    prompts: Iterable[Tokens], max_tokens: int = MAX_TOKENS
) -> dict[Tokens, Tokens]:
    """Greedy answers of the model's own implementation, on one rank in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(SPEC), dtype=torch.float32)
    answers: dict[Tokens, Tokens] = {}
    for prompt in prompts:
        answer: list[int] = []
        following, known = list(prompt), None
        with torch.inference_mode():
            for _ in range(max_tokens):
                step = model(
                    torch.tensor([following]), past_key_values=known, logits_to_keep=1
                )
                logits, known = step.logits[0, -1], step.past_key_values
                logits[: len(SPECIAL_TOKENS)] = float("-inf")
                answer.append(int(logits.argmax()))
                following = answer[-1:]
        answers[prompt] = tuple(answer)
    return answers


# How many tokens a client adds in each turn of a conversation.
_CONVERSATIONS: dict[str, tuple[int, ...]] = {
    "whole": (200, 90, 33, 150, 64, 71),
    "streamed": (70, 100, 31, 200, 80, 65),
    "edited": (300, 80, 80),
    "restarted": (150, 90, 90),
    "threshold": (130, 60),
    "routed": (250, 70, 100, 40),
    **{f"crowd{i}": (400 + 40 * i, 120, 100) for i in range(16)},
}


def conversations() -> tuple[str, ...]:
    """The names of all conversations."""
    return tuple(_CONVERSATIONS)


@cache
def said(conversation: str) -> tuple[Tokens, ...]:
    """What the client of a conversation says, turn by turn."""
    rng = random.Random(f"conversation {conversation}")
    return tuple(
        tuple(random_prompt(n, rng, SPEC)) for n in _CONVERSATIONS[conversation]
    )


def all_asks() -> list[Ask]:
    """Whatever a test may compare."""
    prompts = dict.fromkeys(ask.prompt for ask in served())
    for group in _FRESH:
        prompts.update(dict.fromkeys(fresh(group)))
    return [Ask(prompt) for prompt in prompts]


def words(text: str) -> Tokens:
    """Return the tokens that an answer's text stands for.

    Raises:
        ValueError: it holds something else than the model's words.
    """
    tokens = []
    for word in text.split():
        if word in SPECIAL_TOKENS or not word.startswith("w"):
            raise ValueError(f"{word!r} in an answer is no word of the model")
        tokens.append(int(word[1:]))
    return tuple(tokens)


@dataclass
class References:
    """Right answers, and how often another answer was as good."""

    answers: dict[Tokens, Tokens]
    model: Path = field(default_factory=lambda: tiny_model(SPEC))
    compared: int = 0
    ties: list[str] = field(default_factory=list)

    def expected(self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> Tokens:
        """The answer of the single engine."""
        return self.answers[tuple(prompt)][:max_tokens]

    def turns(self, conversation: str) -> list[Tokens]:
        """The prompts of a conversation, each with all that was said before it."""
        prompts: list[Tokens] = []
        history: Tokens = ()
        for words_said in said(conversation):
            prompts.append(history + words_said)
            history = prompts[-1] + self.expected(prompts[-1])
        return prompts

    def check(self, ask: Ask, got: Tokens) -> str | None:
        """Say what is wrong with an answer, or return ``None``.

        An answer that leaves the expected one where two tokens' logits tie is
        counted as right.
        """
        self.compared += 1
        expected = self.expected(ask.prompt, ask.max_tokens)
        if got == expected:
            return None
        what = f"prompt of {len(ask.prompt)} tokens: got {got}, expected {expected}"
        if len(got) != len(expected):
            return what
        place = next(i for i, token in enumerate(got) if token != expected[i])
        gap = self._logit_gap(ask.prompt + got[:place], got[place], expected[place])
        what += f"; at {place} the logits differ by {gap:.2g}"
        if gap > TIE_LOGITS:
            return what
        self.ties.append(what)
        print(f"tie: {what}")
        return None

    def problems(self, answers: Iterable[tuple[Ask, Tokens]]) -> list[str]:
        """Check several answers; too many ties are a problem too."""
        compared, ties = self.compared, len(self.ties)
        found = [
            problem
            for ask, got in answers
            if (problem := self.check(ask, got)) is not None
        ]
        ties = len(self.ties) - ties
        # One tie may fall into any sample, however small.
        if ties > max(1.0, TIES_PER_ANSWERS * (self.compared - compared)):
            found.append(f"{ties} ties in {self.compared - compared} answers")
        return found

    def _logit_gap(self, context: Tokens, one: int, other: int) -> float:
        """How far apart two candidates for the next token are."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([context]), logits_to_keep=1).logits[0, -1]
        return float((logits[one] - logits[other]).abs())
