# SPDX-License-Identifier: Apache-2.0
"""What all answers together say, and the table of what was moved for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verify_answers import Kind, Verdict
from verify_ask import Outcome
from verify_moved import Movement, by_kind
from verify_result import Moved, Report

ANSWERS = "answers"

_MOST_TIES = 0.25
_REMEDY = (
    "Equal tokens with other probabilities, and wrong answers of long prompts alone, "
    "speak for single KV blocks in the wrong place or written late; all wrong, for "
    "engines that read KV differently (model, dtype, layout). Keep both engines' logs, "
    "set `handoff_trace_file`, and run again with the seed below. --tie-margin is for "
    "engines whose arithmetic is known to differ."
)


_MISSING_REMEDY = (
    "A hand-off that fails ends its request. Why is said above or in D's log "
    "(`Hand-off … failed`), and what to do in docs/features/nixl_handoff.md, under "
    "Troubleshooting. "
    "`circuit_open` is the router's: it spares a D that has failed several times."
)
_RANDOM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Judgement:
    """Outcomes, each with its verdict; ``margin`` is how far rounding may go."""

    judged: tuple[tuple[Outcome, Verdict], ...]
    margin: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], margin: float) -> Judgement:
        """Compare each answer with what it should be."""
        return cls(tuple((one, one.verdict(margin)) for one in outcomes), margin)

    @property
    def wrong(self) -> list[Outcome]:
        """Answers that are wrong or missing."""
        return [one for one, verdict in self._found(Kind.DIFFERENT, Kind.OFF)]

    def tell(
        self, report: Report, asked: int, strict: bool, opinion: Sequence[str]
    ) -> None:
        """Add the check of all answers.

        ``asked`` is how many should have been there, and ``opinion`` what else is
        known of wrong ones.
        """
        count = Counter(verdict.kind for _, verdict in self.judged)
        total, ties = len(self.judged), count[Kind.TIE]
        found = []
        if self.wrong:
            found.append(f"{len(self.wrong)} of {total} answers are wrong or missing")
            found += opinion
        if asked > total:
            found.append(f"{asked - total} were not asked after others had failed")
        if ties > _MOST_TIES * total:
            found.append(f"{ties} of {total} near ties are no chance")
        if strict and ties:
            found.append(f"{ties} answers differ by near ties, and --strict is set")
        said = f"{count[Kind.EQUAL]} of {total} equal token for token"
        if ties:
            said += f", {ties} differ by a near tie only"
        if all(one.answer and one.answer.logprobs for one, _ in self.judged):
            said += f"; logprobs agree within {self.margin:g}"
        differing = self._found(Kind.DIFFERENT, Kind.OFF) + self._found(Kind.TIE)
        missing = [one.answer is None for one in self.wrong]
        remedies = [
            *([_MISSING_REMEDY] if any(missing) else []),
            *([_REMEDY] if not missing or not all(missing) else []),
        ]
        report.add(ANSWERS, found, said, " ".join(remedies), _told(differing))

    def rows(self, found: Movement, page_bytes: int | None) -> list[Moved]:
        """What was moved for each kind of prompt that was answered.

        ``page_bytes`` are those of one block in one of D's regions, if known.
        """
        answered = [(one, v) for one, v in self.judged if one.answer is not None]
        kinds = {one.name: one.question.prompt.kind for one, _ in answered}
        records = by_kind(found, kinds)
        rows = []
        for kind in dict.fromkeys(kinds.values()):
            ours = [(o, v) for o, v in answered if o.question.prompt.kind == kind]
            equal = sum(verdict.kind is Kind.EQUAL for _, verdict in ours)
            known: list[Any] = list(records.get(kind, ()))
            whole = len(known) == len(ours)
            size = sum(r["bytes"] for r in known)
            rows.append(
                Moved(
                    kind,
                    len(ours),
                    sum(len(one.question.tokens) for one, _ in ours),
                    f"{equal} equal",
                    size if whole else None,
                    sum(r["descriptors"] for r in known) if whole else None,
                    sum(r["seconds"] for r in known) if whole else None,
                    size // page_bytes if page_bytes else None,
                )
            )
        return rows

    def _found(self, *kinds: Kind) -> list[tuple[Outcome, Verdict]]:
        return [(one, verdict) for one, verdict in self.judged if verdict.kind in kinds]


def _told(judged: Sequence[tuple[Outcome, Verdict]]) -> list[str]:
    """A line for each answer; those that are missing alike share one."""
    by_text: dict[str, list[tuple[Outcome, Verdict]]] = {}
    for one, verdict in judged:
        alike = one.name if one.answer else _RANDOM.sub("", verdict.text)
        by_text.setdefault(alike, []).append((one, verdict))
    lines = []
    for (first, verdict), *others in by_text.values():
        more = f", and {len(others)} more" if others else ""
        name = f"{first.question.prompt.name}, {first.round}{more}"
        lines.append(f"{name}: {verdict.text}")
    return lines
