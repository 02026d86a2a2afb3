# SPDX-License-Identifier: Apache-2.0
"""How load is measured, and which worker is the best for a leg."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .config import Role
from .routing import Balance, BalanceSettings

if TYPE_CHECKING:
    from .workers import Work, Worker


class Scorer(Protocol):
    """How loads are measured and compared."""

    def cost(self, worker: "Worker", work: "Work") -> float:
        """How much ``work`` adds to the load of ``worker`` while it runs there."""

    def choose(self, candidates: Sequence["Worker"], work: "Work") -> "Worker":
        """The best of these, of which there is one at least."""


class OutstandingRequests:
    """Every running leg weighs the same."""

    def cost(self, worker: "Worker", work: "Work") -> float:
        """One, whatever the work is."""
        return 1.0

    def choose(self, candidates: Sequence["Worker"], work: "Work") -> "Worker":
        """The one with the fewest; among equals, the one that was used longest ago."""
        return min(candidates, key=lambda w: (w.load, w.last_picked))


class OutstandingTokens:
    """A leg weighs the tokens that it computes, or holds in memory.

    That is the prompt without what the worker is known to have of it, and for decode
    the answer. Who has the least to do with this leg added is chosen: a cached
    beginning makes up for as many tokens of other work. With ``max_load`` only
    workers of no more than so many times the average of running legs are looked at,
    so that one popular beginning does not draw everything to one worker.
    """

    def __init__(self, max_load: float | None = None) -> None:
        self._max_load = max_load

    def cost(self, worker: "Worker", work: "Work") -> float:
        """Tokens, at least one."""
        size = work.prompt
        tokens = size.tokens
        if self._max_load is not None:
            tokens -= min(worker.prefixes.tokens(size.chunks), tokens - 1)
        answer = size.answer_tokens if work.role is Role.DECODE else 0
        return float(tokens + answer)

    def choose(self, candidates: Sequence["Worker"], work: "Work") -> "Worker":
        """The one that has the least to do with ``work`` added."""
        allowed = candidates
        if self._max_load is not None:
            legs = sum(worker.outstanding for worker in candidates) + 1
            limit = math.ceil(self._max_load * legs / len(candidates))
            allowed = [w for w in candidates if w.outstanding < limit]
        return min(allowed, key=lambda w: (w.load + self.cost(w, work), w.last_picked))


def scorer(settings: BalanceSettings) -> Scorer:
    """What these settings ask for."""
    match settings.by:
        case Balance.REQUESTS:
            return OutstandingRequests()
        case Balance.TOKENS:
            return OutstandingTokens()
        case Balance.PREFIX:
            return OutstandingTokens(settings.max_load)
