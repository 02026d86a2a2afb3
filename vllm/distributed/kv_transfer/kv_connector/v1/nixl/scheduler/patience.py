# SPDX-License-Identifier: Apache-2.0
"""How long a request that lacks blocks waits for ranks to let go of some."""

YIELD_SECONDS = 0.25
YIELD_STEPS = 3
"""Whichever is longer. What takes longer has a reader whose lease must end first, or a
WRITE to a peer that does not answer."""


def is_recent(seconds: float, steps: int) -> bool:
    """Whether what began so long ago may be over in the next step."""
    return seconds < YIELD_SECONDS or steps < YIELD_STEPS
