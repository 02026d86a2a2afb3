# SPDX-License-Identifier: Apache-2.0
"""Asks the prompts: once for the reference, and through the hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from verify_answers import Answer, Kind, Verdict, compare
from verify_http import AskError
from verify_prompts import Prompt, Tokens

MOST_FAILURES = 3
"""Requests of one round that may fail until the rest is not asked any more."""


@dataclass(frozen=True)
class Question:
    """A prompt in full, with what was said before it, and its right answer."""

    prompt: Prompt
    tokens: Tokens
    expected: Answer


@dataclass
class Outcome:
    """One question asked once more. ``name`` is the request's id."""

    question: Question
    name: str
    round: str
    answer: Answer | None = None
    failure: str = ""

    def verdict(self, margin: float) -> Verdict:
        """How the answer compares."""
        if self.answer is None:
            return Verdict(Kind.DIFFERENT, self.failure)
        return compare(self.question.expected, self.answer, margin)


@dataclass
class Round:
    """All questions asked in one way; ``outcomes`` are in no order."""

    title: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """How many got no answer."""
        return sum(outcome.answer is None for outcome in self.outcomes)


AskReference = Callable[[Tokens], Awaitable[Answer]]
AskPair = Callable[[Question, str], Awaitable[Answer]]
"""Asks a question under a request id."""


async def references(
    prompts: Sequence[Prompt], ask: AskReference, at_once: int
) -> list[Question]:
    """The right answer to each, in their order.

    Raises:
        AskError: one was not answered.
    """
    turns = asyncio.Semaphore(at_once)

    async def strand(chain: list[Prompt]) -> list[Question]:
        async with turns:
            history: Tokens = ()
            found = []
            for prompt in chain:
                tokens = history + prompt.tokens
                answer = await ask(tokens)
                found.append(Question(prompt, tokens, answer))
                history = tokens + answer.tokens
            return found

    tasks = [asyncio.create_task(strand(chain)) for chain in _strands(prompts)]
    try:
        return [
            question for found in await asyncio.gather(*tasks) for question in found
        ]
    finally:
        for task in tasks:
            task.cancel()


async def ask_again(
    title: str,
    questions: Sequence[Question],
    ask: AskPair,
    names: Callable[[], str],
    at_once: int,
) -> Round:
    """Ask all of them, ``at_once`` at a time; later turns after earlier ones."""
    done = Round(title)
    turns = asyncio.Semaphore(at_once)

    async def strand(chain: list[Question]) -> None:
        async with turns:
            for question in chain:
                if done.failures >= MOST_FAILURES:
                    return
                outcome = Outcome(question, names(), title)
                try:
                    outcome.answer = await ask(question, outcome.name)
                except AskError as error:
                    outcome.failure = str(error)
                done.outcomes.append(outcome)

    by_name = {question.prompt.name: question for question in questions}
    chains = _strands([question.prompt for question in questions])
    await asyncio.gather(
        *(strand([by_name[prompt.name] for prompt in chain]) for chain in chains)
    )
    return done


def _strands(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Prompts that must follow each other, together."""
    strands: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        strands.setdefault(prompt.conversation or prompt.name, []).append(prompt)
    return list(strands.values())
