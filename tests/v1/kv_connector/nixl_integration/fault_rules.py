# SPDX-License-Identifier: Apache-2.0
"""What the tests tell a faulty connector to do, and what it tells them back.

The tests write a :class:`Plan` to a control file, and the connector appends an
:class:`Event` per line to the file beside it. Both may change while engines run.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

CONTROL_VARIABLE = "KVFORK_FAULT_CONTROL"
"""Names the environment variable with the path of an engine's control file."""

ANY = "*"
POLL_S = 0.02

Where = Literal["send", "receive", "post"]
Action = Literal["drop", "repeat", "delay", "hold", "fail", "fail_late", "mute"]


class Rule(msgspec.Struct, frozen=True):
    """One fault; the first rule that fits is applied.

    Attributes:
        on: a notification that is sent or received, or a transfer that is posted.
        do: ``drop``, ``repeat`` (the same once more), ``delay`` (by ``seconds``) and
            ``hold`` (until the rule is taken away) fit notifications; ``delay``,
            ``hold``, ``fail`` (in the posting call), ``fail_late`` (at its end) and
            ``mute`` (without its notification) fit transfers.
        kind: the message's tag, or ``WRITE`` or ``READ``.
        transfer: how the hand-off's ``transfer_id`` begins.
        count: how often it is applied to one hand-off.
    """

    on: Where
    do: Action
    kind: str = ANY
    transfer: str = ""
    count: int | None = None
    seconds: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """All that is wrong with one engine.

    Attributes:
        rules: by a name, under which their applications are counted.
        cut: nothing reaches a peer, nor anything of a peer this engine.
        step_delay: seconds by which each step is made longer.
        careless: a decode engine takes a peer's silence for a proof that it cannot
            write any more: a defect, which the tests must notice.
        trace: whether all is logged, or only the faults.
    """

    rules: dict[str, Rule] = {}
    cut: bool = False
    step_delay: float = 0.0
    careless: bool = False
    trace: bool = True


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that the connector did or saw; ``fault`` says how it went wrong."""

    what: str
    kind: str = ""
    transfer: str = ""
    fault: str = ""


def events_path(control: Path) -> Path:
    """Where the connector logs its events."""
    return control.with_suffix(".events")


class Control:
    """The tests' end of one engine's control file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = Plan()
        self._offset = 0
        events_path(path).touch()
        self.apply(self.plan)

    def apply(self, plan: Plan) -> None:
        """Make ``plan`` what is wrong from now on."""
        self.plan = plan
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(plan))
        os.replace(partial, self.path)

    def change(self, **changes: object) -> None:
        """Replace fields of the plan."""
        self.apply(msgspec.structs.replace(self.plan, **changes))

    def add(self, **rules: Rule) -> None:
        """Add rules to those that hold."""
        self.change(rules={**self.plan.rules, **rules})

    def remove(self, *names: str) -> None:
        """Take rules away, which also lets go of what they hold."""
        kept = {k: v for k, v in self.plan.rules.items() if k not in names}
        self.change(rules=kept)

    def clear(self) -> None:
        """Let everything be right again."""
        self.apply(Plan(trace=self.plan.trace))

    def mark(self) -> int:
        """The present end of the log, for :meth:`events`."""
        return events_path(self.path).stat().st_size

    def events(self, since: int = 0) -> list[Event]:
        """What was logged after ``since``."""
        with events_path(self.path).open("rb") as file:
            file.seek(since)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        return [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]

    def wait(
        self, what: str, fits: Callable[[Event], bool], timeout: float, since: int = 0
    ) -> Event:
        """Wait for an event.

        Raises:
            AssertionError: none came within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for event in self.events(since):
                if fits(event):
                    return event
            if time.monotonic() > deadline:
                latest = [msgspec.to_builtins(e) for e in self.events(since)[-10:]]
                raise AssertionError(
                    f"{self.path.stem} did not log {what} within {timeout:g} s; the "
                    f"latest events are {json.dumps(latest)}"
                )
            time.sleep(POLL_S)
