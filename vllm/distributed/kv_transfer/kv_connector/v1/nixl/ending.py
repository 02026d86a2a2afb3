# SPDX-License-Identifier: Apache-2.0
"""The end of a rank: nothing begins any more, what is under way may still end.

The engine computes nothing by then. KV that is computed may be taken, by those who
have asked for it and by those who come; everything else is refused, so that nobody
waits for an engine that is gone.
"""

from vllm.logger import init_logger

from .connections import Connections
from .handoff.actions import Action
from .handoff.kept import KeptTable
from .handoff.receiver import ReceiverTable
from .handoff.sender import SenderTable
from .ids import AgentName
from .movement import Movement

logger = init_logger(__name__)

STEP_SECONDS = 0.0005
"""From one step to the next."""

REASON = "the engine is being shut down"


class Ending:
    """What is left to do before a rank takes its leave."""

    def __init__(
        self,
        sender: SenderTable,
        kept: KeptTable,
        receiver: ReceiverTable,
        movement: Movement,
        connections: Connections,
    ) -> None:
        self._sender = sender
        self._kept = kept
        self._receiver = receiver
        self._movement = movement
        self._connections = connections

    def begin(self, now: float) -> list[Action]:
        """Refuse, withdraw and cancel all that cannot come about any more."""
        return [
            *self._sender.wind_up(REASON, now),
            *self._kept.wind_up(now),
            *self._receiver.wind_up(REASON, now),
        ]

    def is_awaited(self) -> bool:
        """Whether somebody who lives may take, or has to give back, something."""
        return (
            len(self._movement) > 0
            or self._sender.unclaimed > 0
            or any(self._connections.usable(name) is not None for name in self._owing())
        )

    def tell_left(self, patience: float) -> None:
        """Log what was waited for in vain."""
        unclaimed, owing = self._sender.unclaimed, len(self._owing())
        if unclaimed or owing:
            logger.warning(
                "After %g s this engine ends with the KV of %d prompts that nobody has "
                "asked for, and %d peers with something under way; a larger "
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS (and --shutdown-timeout) waits "
                "longer",
                patience,
                unclaimed,
                owing,
            )

    def _owing(self) -> set[AgentName]:
        return self._receiver.peers() | self._sender.peers() | self._kept.peers()
