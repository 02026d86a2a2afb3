# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: short and long completions and chats on invented text."""

from __future__ import annotations

import random

from pd_client import Ask

_SHIPS = ("Anselma", "Brightwater", "Corvina", "Dunmore", "Estuary Rose", "Fulmar")
_CARGOES = ("salted herring", "roof slates", "window glass", "barley", "printed cloth")
_PORTS = ("Ravensholm", "Old Lissey", "Port Tamber", "Skarvik", "Marrow Sound")
_EVENTS = (
    "The pilot boarded late because of the tide.",
    "Two barrels were found broken and were written off.",
    "The master asked for fresh water and was given twelve casks.",
    "A new sail was taken on board before noon.",
    "The crew of {crew} stayed ashore for one night.",
    "The harbour fee of {fee} crowns was paid in full.",
)


def harbour_log(entries: int, seed: int) -> str:
    """Return an invented harbour log; an entry is about 43 tokens."""
    rng = random.Random(seed)
    lines = []
    for number in range(1, entries + 1):
        event = rng.choice(_EVENTS).format(
            crew=rng.randrange(6, 30), fee=rng.randrange(20, 90)
        )
        lines.append(
            f"Entry {number}. The ship {rng.choice(_SHIPS)} came in from "
            f"{rng.choice(_PORTS)} with {rng.randrange(10, 400)} crates of "
            f"{rng.choice(_CARGOES)} and left for {rng.choice(_PORTS)}. {event}"
        )
    return "\n".join(lines)


def demo_requests() -> list[Ask]:
    """Return the requests in the order in which they are sent.

    The first is answered in one piece. The last two share a long beginning, so
    that the decode engine has most of the second one cached already.
    """
    medium = harbour_log(26, seed=1)
    long = harbour_log(58, seed=2)
    return [
        Ask("completion, not streamed", "The capital of France is", 12, stream=False),
        Ask("completion", "Water boils at a temperature of", 24),
        Ask("chat", "Name the three primary colours.", 24, chat=True),
        Ask("chat", "Write two sentences about the sea.", 40, chat=True),
        Ask("completion", "Once upon a time, in a village by a river,", 40),
        Ask("long completion", f"{medium}\nEntry 27. The ship", 32),
        Ask(
            "long chat",
            f"{long}\n\nWhich goods does this harbour log mention?",
            32,
            chat=True,
        ),
        Ask(
            "long chat, same beginning",
            f"{long}\n\nSummarise the last entry of this log.",
            32,
            chat=True,
        ),
    ]
