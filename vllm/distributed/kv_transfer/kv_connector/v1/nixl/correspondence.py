# SPDX-License-Identifier: Apache-2.0
"""What peers say to one rank and are told, as NIXL notifications.

Who has not introduced itself is not heard, and who does not fit is turned away. What
is about the connection itself is dealt with here; the rest is passed on.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from vllm.logger import init_logger

from . import stats as names
from .agent import Agent, AgentError, PeerDisconnected
from .connections import Connections
from .handoff.actions import Action, Send
from .handoff.delivery import HandoffMessage
from .ids import AgentName
from .peers import Peer
from .stats import StatsCollector
from .wire.codec import PROTOCOL_VERSION, WireError, encode, printable
from .wire.notifications import (
    Goodbye,
    HelloAck,
    LeaseRequest,
    Message,
    Packet,
    Ping,
    Pong,
    Refused,
    Register,
    decode_packet,
)

logger = init_logger(__name__)

Hearer: TypeAlias = Callable[[AgentName, Peer, HandoffMessage, float], None]
"""Takes what a peer has said of KV, and when, in seconds."""


class Correspondence:
    """The notifications of one rank.

    Args:
        agent: the registered NIXL agent.
        connections: the peers.
        stats: counts what cannot be sent.
        clock: seconds, monotonic.
        do: takes answers, which are sent when it is their turn.
    """

    def __init__(
        self,
        agent: Agent,
        connections: Connections,
        stats: StatsCollector,
        clock: Callable[[], float],
        do: Callable[[Iterable[Action]], None],
    ) -> None:
        self._agent = agent
        self._connections = connections
        self._stats = stats
        self._clock = clock
        self._do = do
        self._deaf = False

    def listen(self, now: float, hear: Hearer) -> bool:
        """Take all that has come; returns whether something has.

        ``hear`` is called with what is about KV, in its order.
        """
        try:
            received = self._agent.notifications()
        except AgentError as error:
            if not self._deaf:
                logger.warning("NIXL could not be asked for notifications: %s", error)
            self._deaf = True
            return False
        self._deaf = False
        for name, data in received:
            try:
                self._take(name, decode_packet(data), now, hear)
            except (WireError, AgentError) as error:
                logger.warning("A notification of agent %s is ignored: %s", name, error)
            except Exception:
                logger.exception("A notification of agent %s failed", name)
        return bool(received)

    def send(self, name: AgentName, message: Message) -> None:
        """Tell a peer something; what is not sent is counted, and not said again."""
        peer = self._connections.peer(name)
        if peer is None or peer.broken:
            return
        hello = self._connections.introduction(name, self._clock())
        packet = Packet(PROTOCOL_VERSION, hello, message)
        try:
            self._agent.notify(name, encode(packet))
        except PeerDisconnected as error:
            self._stats.failure(names.FAILED_NOTIFICATIONS)
            self._connections.broken(name, str(error))
        except AgentError as error:
            self._stats.failure(names.FAILED_NOTIFICATIONS)
            logger.warning(
                "%s to agent %s was not sent: %s", type(message).__name__, name, error
            )

    def _take(self, name: AgentName, packet: Packet, now: float, hear: Hearer) -> None:
        peer = self._connections.peer(name)
        if packet.hello is not None:
            peer = self._connections.greet(name, packet.hello, now)
            self._do([Send(name, HelloAck(peer.refusal))])
        if peer is None:
            raise WireError("the agent has not introduced itself")
        self._connections.heard(name, peer, now)
        if peer.refusal is not None:
            self._turn_away(name, peer.refusal, packet.body)
            return
        match packet.body:
            case HelloAck():
                peer.greeted = True
                if packet.body.refusal is not None:
                    logger.warning(
                        "Engine %s refuses: %s",
                        peer.info.engine_id,
                        printable(packet.body.refusal),
                    )
            case Ping():
                self._do([Send(name, Pong())])
            case Pong():
                pass
            case Goodbye():
                self._connections.left(name)
            case body:
                hear(name, peer, body, now)

    def _turn_away(self, name: AgentName, refusal: str, body: Message) -> None:
        if isinstance(body, Register | LeaseRequest):
            self._do([Send(name, Refused(body.registration_id, refusal))])
