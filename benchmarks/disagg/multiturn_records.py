# SPDX-License-Identifier: Apache-2.0
"""What the multi-turn benchmark writes down, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multiturn_traffic import Setting

FORMAT = 1
"""Raised when a field changes its meaning."""


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation; times are in seconds.

    A value that the engines do not tell is ``None``.

    Attributes:
        conversation: counted from 0.
        turn: counted from 1.
        new_tokens: tokens of the prompt that follow the previous answer.
        ttft: from sending the turn to the first token.
        total: from sending the turn to the last token.
        prefill: from sending the prefill leg to its end.
        transfer: the READ of what D keeps, as P reports it.
        compute: from P's first scheduling of the rest to its token.
        waiting: what is left of ``prefill``: HTTP, queue, question to D, steps.
        tokens_computed: tokens of the prompt that P computed.
        tokens_cached: tokens that P had in its own cache.
        tokens_read: tokens that P read from D.
        read_outcome: P's word on the READ; ``not asked`` where there was no question.
        answer: the tokens of the answer.
    """

    conversation: int
    turn: int
    prompt_tokens: int
    new_tokens: int
    ttft: float
    total: float
    prefill: float | None
    transfer: float | None
    compute: float | None
    waiting: float | None
    tokens_computed: int | None
    tokens_cached: int | None
    tokens_read: int | None
    read_outcome: str | None
    answer: tuple[int, ...]


@dataclass
class Run:
    """One setting in one repetition.

    Attributes:
        mode: ``push`` or ``pull``.
        repetition: counted from 0.
        place: place in the order of its repetition, counted from 0.
        comparable: whether other settings got the same prompts.
        through_router: whether a router sent the legs.
        started_at: seconds since the epoch.
        load_average: processes that wanted a core of this machine in the minute
            before; more than it has cores spoil times of engines on it.
        seconds: from the first turn to the end of the last one.
        reader_tokens: tokens read from D in this run, as P counts them.
        errors: turns that failed, each of which ended its conversation.
    """

    mode: str
    setting: Setting
    repetition: int
    place: int
    comparable: bool
    through_router: bool
    started_at: float
    load_average: float
    seconds: float = 0.0
    reader_tokens: int | None = None
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return f"{self.mode}_{self.setting.name}_rep{self.repetition + 1}"

    @property
    def turns_per_second(self) -> float:
        """The rate that was achieved."""
        return len(self.turns) / self.seconds if self.seconds else 0.0

    def save(self, folder: Path, about: dict[str, Any]) -> Path:
        """Write the run, with ``about`` telling how it was made; returns the file."""
        path = folder / f"{self.name}.json"
        document = {
            "format": FORMAT,
            **asdict(self),
            "turns_per_second": self.turns_per_second,
            "about": about,
        }
        write_json(path, document)
        return path


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document, one whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_runs(folder: Path) -> list[Run]:
    """Read all runs of a folder.

    Raises:
        ValueError: a file is of another format.
    """
    found = []
    for path in sorted(folder.glob("*_rep*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("format", None) != FORMAT:
            raise ValueError(
                f"{path} is not of format {FORMAT}: it was written by another version "
                "of this benchmark; remove it or run again"
            )
        del document["about"], document["turns_per_second"]
        document["setting"] = Setting(**document["setting"])
        document["turns"] = [
            Turn(**{**turn, "answer": tuple(turn["answer"])})
            for turn in document["turns"]
        ]
        found.append(Run(**document))
    return found
