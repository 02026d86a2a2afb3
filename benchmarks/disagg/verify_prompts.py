# SPDX-License-Identifier: Apache-2.0
"""The prompts of a verification, of exact lengths in tokens, for any model.

Text of plain English words goes through the model's own tokenizer, so that answers
are decisive. Where its words are unknown to the tokenizer, random ids take their
place: those from 100 on are ordinary pieces in all common vocabularies.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Tokens = tuple[int, ...]
Tokenize = Callable[[str], Awaitable[Tokens | None]]
"""Ids of a text; ``None`` where nobody tokenizes."""

ANSWER_TOKENS = 16
SHORT, TURN = 7, 40
TURNS = 3

_FIRST_ID, _IDS = 100, 900
_FEWEST_DIFFERENT = 48
_TEXT = (
    "the a one two three four some many few old new small large red blue green grey "
    "house river road table paper letter garden window stone winter summer morning "
    "evening city village teacher doctor farmer sailor child mother father friend "
    "horse bird fish tree apple bread water wine salt sugar iron silver gold glass "
    "walks runs writes reads finds loses builds breaks opens closes sells buys sees "
    "hears says asks answers and but because when while before after under over near "
    "behind with without slowly quickly often never always today yesterday again"
)


@dataclass(frozen=True)
class Prompt:
    """One prompt to be asked.

    ``name`` is unique; ``kind`` is what reports sum over. A ``conversation``'s prompts
    follow each other, each repeating all that was said before, answers included: its
    ``tokens`` are then what is new.
    """

    name: str
    kind: str
    tokens: Tokens
    conversation: str = ""


async def make_prompts(
    seed: int, block_size: int, longest: int, tokenize: Tokenize
) -> list[Prompt]:
    """The prompts of a seed, none of which is the beginning of another.

    ``block_size`` is that of the side whose blocks are larger, and ``longest`` the
    length of the longest prompt, both in tokens.
    """
    made = _Maker(random.Random(seed), tokenize)
    block = block_size
    prompts = [
        Prompt("short", "short", await made.tokens(SHORT)),
        Prompt("one block", "one block", await made.tokens(block)),
    ]
    for length in (block - 1, block + 1, 2 * block, 3 * block - 1, 3 * block + 1):
        tokens = await made.tokens(length)
        prompts.append(Prompt(f"{length} tokens", "across block edges", tokens))
    for number in (1, 2):
        # Not a whole number of blocks, and another one for each.
        tokens = await made.tokens(longest - number * (block // 2 + 1))
        prompts.append(Prompt(f"long {number}", "long", tokens))
    prefix = await made.tokens(4 * block)
    for number in (1, 2, 3):
        tokens = prefix + await made.tokens(block // 2 + number)
        prompts.append(Prompt(f"prefix {number}", "repeated prefix", tokens))
    for number in range(1, TURNS + 1):
        tokens = await made.tokens(TURN)
        prompts.append(Prompt(f"turn {number}", "multi-turn", tokens, "conversation"))
    return [p for p in prompts if len(p.tokens) <= longest]


class _Maker:
    def __init__(self, rng: random.Random, tokenize: Tokenize) -> None:
        self._rng = rng
        self._tokenize = tokenize
        self._by_words: bool | None = None

    async def tokens(self, length: int) -> Tokens:
        """So many tokens, of text where the model's tokenizer knows its words."""
        if self._by_words is None:
            sample = await self._tokenize(self._text(400))
            self._by_words = bool(sample and len(set(sample)) >= _FEWEST_DIFFERENT)
        if self._by_words:
            found = await self._tokenize(self._text(2 * length + 16))
            if found is not None and len(found) >= length:
                return found[:length]
        return tuple(self._rng.randrange(_FIRST_ID, _IDS) for _ in range(length))

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(_TEXT.split(), k=words))
