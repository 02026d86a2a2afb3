# SPDX-License-Identifier: Apache-2.0
"""Names for the identities that a hand-off is made of.

They are all strings on the wire; distinct types keep one from being passed
where another is meant.
"""

import secrets
from enum import StrEnum
from typing import NewType

TransferId = NewType("TransferId", str)
"""One dispatch of one prompt, chosen by the router and equal on both legs."""

RegistrationId = NewType("RegistrationId", str)
"""One attempt of one decode request to obtain its KV; never reused."""

RequestId = NewType("RequestId", str)
"""The engine's internal request id."""

KEPT_PREFIX = "kept-"
"""Begins the names of kept KV. No hand-off may be called so, since messages about
the two go to different tables, and a wrong table's word that nothing writes any more
would be no proof."""

EngineId = NewType("EngineId", str)
"""The configured engine id; it may survive a restart, an agent name does not."""

AgentName = NewType("AgentName", str)
"""One NIXL agent: one worker rank of one engine incarnation."""


class Mode(StrEnum):
    """Which side moves the bytes: the prefill side WRITEs or the decode side READs."""

    PUSH = "push"
    PULL = "pull"


def new_registration_id() -> RegistrationId:
    """A random id that no earlier attempt can have used."""
    return RegistrationId(secrets.token_hex(12))


def new_generation(count: int) -> int:
    """A number for the ``count``-th computation of a prompt in this engine.

    Greater than those before, and not to be guessed: whoever knows it was told by
    this engine, which tells nobody before the prompt is computed.
    """
    return count << 32 | secrets.randbits(32)


def new_agent_name(engine_id: EngineId, rank: int) -> AgentName:
    """A name that is new for every incarnation, so that a restart is visible."""
    return AgentName(f"{engine_id}:{rank}:{secrets.token_hex(8)}")
