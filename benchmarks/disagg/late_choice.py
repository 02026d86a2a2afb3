# SPDX-License-Identifier: Apache-2.0
"""How often a late choice of D would have differed, and what the early one cost.

    python late_choice.py results/push.choices.jsonl
    python late_choice.py results/pull-early.choices.jsonl results/pull.choices.jsonl

Reads what a router wrote with ``--choice-log`` (``run_sweep.sh`` leaves it beside the
rows). A choice differs if another D ran fewer requests when prefill had ended than the
one that was, or would have been, chosen at the beginning; equally loaded ones do not
differ. With two logs, the first chosen early and the second late under the same load,
the times of all their hand-offs are compared, too: that is what choosing early cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LogError(ValueError):
    """A file is no choice log; the text names the line."""


@dataclass(frozen=True)
class Choice:
    """One hand-off; times are in seconds from its dispatch.

    Attributes:
        early: the D that is taken at dispatch.
        loads: each D's other running requests when prefill had ended.
        chosen: the D that was really taken.
        prefilled, answered, finished: when prefill had ended, when D's first event
            came, and when its last one came; ``None`` if it never did.
    """

    early: str
    loads: Mapping[str, float]
    chosen: str | None
    prefilled: float
    answered: float | None
    finished: float | None

    @property
    def excess(self) -> float:
        """How many requests more the early D ran than the least loaded one."""
        # A D that has failed since runs nothing for anybody.
        return self.loads.get(self.early, float("inf")) - min(self.loads.values())

    @property
    def differs(self) -> bool:
        """Whether a late choice takes another D than an early one."""
        return self.excess > 0

    @property
    def decode_wait(self) -> float | None:
        """From the end of prefill to D's first event."""
        return None if self.answered is None else self.answered - self.prefilled

    @property
    def decoding(self) -> float | None:
        """From D's first event to its last one."""
        if self.answered is None or self.finished is None:
            return None
        return self.finished - self.answered


def load(path: Path) -> list[Choice]:
    """Read a log.

    Raises:
        LogError: a line is none of a choice log's.
    """
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_parse(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                # A router that was killed leaves half a line.
                continue
            raise LogError(
                f"{path}, line {number}: not what --choice-log writes ({error!r})"
            ) from error
    return found


def _parse(line: Any) -> Choice:
    seconds = line["seconds"]
    return Choice(
        line["early"]["choice"],
        {name: float(value) for name, value in line["late"]["loads"].items()},
        line["chosen"],
        seconds["prefilled"],
        seconds.get("answered"),
        seconds.get("finished"),
    )


def summary(choices: Sequence[Choice]) -> dict[str, Any]:
    """Counts, and medians of those that differ and of those that do not."""
    differing = [one for one in choices if one.differs]
    same = [one for one in choices if not one.differs]
    excess = [one.excess for one in differing if one.excess != float("inf")]
    return {
        "handoffs": len(choices),
        "decode_engines": len({name for one in choices for name in one.loads}),
        "differing": len(differing),
        "share_differing": len(differing) / len(choices) if choices else None,
        "median_excess_requests": _median(excess),
        "greatest_excess_requests": max(excess, default=None),
        "decode_wait_differing": _median(_known(differing, "decode_wait")),
        "decode_wait_same": _median(_known(same, "decode_wait")),
        "decoding_differing": _median(_known(differing, "decoding")),
        "decoding_same": _median(_known(same, "decoding")),
    }


def cost(early: Sequence[Choice], late: Sequence[Choice]) -> dict[str, Any]:
    """Early over late, as ratios of medians; ``None`` where one has no times."""
    found = {}
    for name in ("answered", "decode_wait", "decoding"):
        one, other = _median(_known(early, name)), _median(_known(late, name))
        found[f"{name}_early_over_late"] = one / other if one and other else None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("late", type=Path, nargs="?", help="of a router choosing late")
    options = parser.parse_args(argv)
    try:
        logs = [load(path) for path in (options.log, options.late) if path is not None]
    except (OSError, LogError) as error:
        print(f"late_choice: {error}", file=sys.stderr)
        return 2
    document: dict[str, Any] = {"first": summary(logs[0])}
    if len(logs) > 1:
        document["second"] = summary(logs[1])
        document["cost"] = cost(*logs)
    print(json.dumps(document, indent=2))
    if document["first"]["decode_engines"] < 2:
        print("late_choice: one D leaves no choice", file=sys.stderr)
        return 1
    return 0


def _known(choices: Sequence[Choice], name: str) -> list[float]:
    values = (getattr(one, name) for one in choices)
    return [value for value in values if value is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
