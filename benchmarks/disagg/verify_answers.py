# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is the one that it should be, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        logprobs: of each token; empty where the server gives none.
        top: the likeliest tokens at each place with their logprobs, this one included.
        seconds: to the first token where it was streamed, else to the whole.
        params: the ``kv_transfer_params`` that came with it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    seconds: float = 0.0
    params: Mapping[str, object] | None = None


class Kind(Enum):
    """How two answers compare."""

    EQUAL = auto()
    TIE = auto()
    """Tokens differ where both answers give the two nearly the same probability."""
    OFF = auto()
    """Same tokens, other probabilities than arithmetic of this precision explains."""
    DIFFERENT = auto()


@dataclass(frozen=True)
class Verdict:
    """``text`` says what differs, and where."""

    kind: Kind
    text: str = ""


def compare(reference: Answer, got: Answer, margin: float) -> Verdict:
    """Compare token by token and probability by probability.

    Two computations of one prompt differ by rounding, so that a token which leads by
    less than that may lose. Such a near tie is one only if everything else agrees:
    before it, each token's logprob in both answers, and there, those of both tokens.
    ``margin`` is the largest difference between logprobs that rounding may cause.
    """
    place = _first_difference(reference.tokens, got.tokens)
    known = min(len(reference.logprobs), len(got.logprobs))
    compared = known if place is None else min(known, place)
    for at in range(compared):
        off = abs(reference.logprobs[at] - got.logprobs[at])
        if not off <= margin:
            return Verdict(
                Kind.OFF if place is None else Kind.DIFFERENT,
                f"token {at + 1} has the logprob {got.logprobs[at]:.4f}, expected "
                f"{reference.logprobs[at]:.4f}",
            )
    if place is None:
        return Verdict(Kind.EQUAL)
    if place >= min(len(reference.tokens), len(got.tokens)):
        return Verdict(
            Kind.DIFFERENT,
            f"{len(got.tokens)} tokens, expected {len(reference.tokens)}",
        )
    wanted, found = reference.tokens[place], got.tokens[place]
    said = f"token {place + 1} is {found}, expected {wanted}"
    gaps = _gaps(reference, got, place)
    if gaps is None:
        return Verdict(Kind.DIFFERENT, said)
    said += f" (they are {gaps[0]:.4f} and {gaps[1]:.4f} apart)"
    tie = all(gap <= margin for gap in gaps)
    return Verdict(Kind.TIE if tie else Kind.DIFFERENT, said)


def _gaps(reference: Answer, got: Answer, place: int) -> tuple[float, ...] | None:
    """By how much each answer prefers its token, and how far both see each."""
    if place >= min(len(reference.top), len(got.top)):
        return None
    here, there = reference.top[place], got.top[place]
    wanted, found = reference.tokens[place], got.tokens[place]
    if not all(token in top for token in (wanted, found) for top in (here, there)):
        # Not among the likeliest: that is no tie.
        return None
    return (
        here[wanted] - here[found],
        there[found] - there[wanted],
        abs(here[wanted] - there[wanted]),
        abs(here[found] - there[found]),
    )


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    differing = (at for at, (one, other) in pairs if one != other)
    return next(differing, min(len(a), len(b)))
