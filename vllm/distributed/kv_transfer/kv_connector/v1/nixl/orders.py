# SPDX-License-Identifier: Apache-2.0
"""What passes between the forward thread and the transfer loop."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from .commands import Command
from .handoff.actions import Event, Offer

Fence = Callable[[], bool]
"""Whether the computation that fills an offer's blocks has finished."""


class Pace(IntEnum):
    """How soon the next step is worth taking.

    Something moves (NOW), somebody waits for what may come (SOON), somebody is asked
    who has other work meanwhile (STEADY), what may come is waited for by nobody yet
    (LATER), only a first contact can come (RELAXED).
    """

    NOW = 0
    SOON = 1
    STEADY = 2
    LATER = 3
    RELAXED = 4


@dataclass(frozen=True)
class Facts:
    """What one step brought, and how many entries each table then had."""

    events: tuple[Event, ...]
    tables: dict[str, int]

    def after(self, earlier: "Facts | None") -> "Facts":
        """These and what came before; the tables are the latest."""
        if earlier is None:
            return self
        return Facts(earlier.events + self.events, self.tables)


@dataclass(frozen=True)
class PendingOffer:
    """KV whose computation was launched, with the fence that tells its end.

    ``launched_at`` is the end of that forward pass on the host, in seconds.
    """

    offer: Offer
    fence: Fence
    launched_at: float | None = None


Order: TypeAlias = Command | PendingOffer
