# SPDX-License-Identifier: Apache-2.0
"""Which engines this rank can speak to, and what has become of the others.

A peer is *lost* when it owes an answer and is silent for too long: it may come
back, and it may still write. It is *gone* when that is excluded by proof: its
process on this host has ended, another incarnation answers in its place, or it
has taken its leave. Only the latter lets its blocks be used again.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from vllm.logger import init_logger

from .agent import Agent, AgentError
from .auth import Token, introduced
from .config import ConnectorConfig
from .handoff.liveness import Liveness
from .ids import AgentName
from .peers import Peer, PeerDirectory, Prepared
from .process import why_not_copied
from .side_channel import Address, Handshake, HandshakeClient
from .topology import TopologyError
from .wire.codec import WireError, encode
from .wire.notifications import Hello
from .wire.ranks import RankInfo, decode_rank

logger = init_logger(__name__)

PROBE_SECONDS = 2.0

FAMILIAR_SECONDS = 1.0
"""A peer that was silent for longer may have forgotten this rank."""


@dataclass(frozen=True)
class Engine:
    """The ranks of another engine that this one has to do with.

    Attributes:
        sources: those that have something for this rank.
        idle: those that have nothing for any rank of this engine, where it is this
            rank that tells them so.
    """

    sources: tuple[AgentName, ...]
    idle: tuple[AgentName, ...] = ()

    @property
    def all(self) -> tuple[AgentName, ...]:
        """Both, which are to be told what concerns a whole hand-off."""
        return self.sources + self.idle


@dataclass(frozen=True)
class EngineUp:
    """The engine at ``address`` can be spoken to."""

    address: Address
    engine: Engine


@dataclass(frozen=True)
class EngineDown:
    """The engine at ``address`` cannot be spoken to, or must not be."""

    address: Address
    reason: str


@dataclass(frozen=True)
class PeerLost:
    """A peer does not answer."""

    peer: AgentName
    reason: str


@dataclass(frozen=True)
class PeerGone:
    """It is proven that a peer can write no more."""

    peer: AgentName
    reason: str


ConnectionEvent: TypeAlias = EngineUp | EngineDown | PeerLost | PeerGone


class Connections:
    """All peers of one rank.

    Args:
        config: settings.
        agent: the local NIXL agent.
        local: this rank's description.
        token: the secret that peers must hold, if any.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        agent: Agent,
        local: RankInfo,
        token: Token | None,
    ) -> None:
        self._config = config
        self._local = local
        self._token = token
        self._encoded = encode(local)
        self._peers = PeerDirectory(agent, local, config.enforce_handshake_compat)
        self._handshakes = HandshakeClient(config.handshake_timeout, token)
        self._liveness = Liveness(config.peer_timeout)
        self._engines: dict[Address, Engine] = {}
        self._wanted: set[Address] = set()
        self._events: list[ConnectionEvent] = []
        self._next_probe = 0.0

    # ---- engines

    @property
    def pending(self) -> bool:
        """Whether somebody waits for an engine or an event; probes can wait."""
        return bool(self._wanted or self._events)

    def engine(self, address: Address) -> Engine | None:
        """The engine at ``address``, once connected."""
        return self._engines.get(address)

    def connect(self, address: Address, now: float) -> None:
        """Ask for an :class:`EngineUp` or :class:`EngineDown`."""
        self._wanted.add(address)
        self._handshakes.start(address, now)

    def poll(self, now: float) -> list[ConnectionEvent]:
        """What has happened since the last call."""
        for handshake in self._handshakes.poll(now):
            self._handshaken(handshake, now)
        events, self._events = self._events, []
        return events

    # ---- peers

    def peer(self, name: AgentName) -> Peer | None:
        """A known peer."""
        return self._peers.get(name)

    def usable(self, name: AgentName) -> Peer | None:
        """A peer with which a transfer may be started."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def readers(self, name: AgentName) -> int:
        """See :meth:`.peers.PeerDirectory.readers`."""
        return self._peers.readers(name)

    def prepared(self, name: AgentName, gives: bool, parts: int) -> Prepared:
        """See :meth:`.peers.PeerDirectory.prepared`."""
        return self._peers.prepared(name, gives, parts)

    def introduction(self, name: AgentName, now: float) -> Hello | None:
        """What a notification to ``name`` must carry.

        None where it has acknowledged one and was heard of just now: an idle peer
        forgets this rank after an ``engine_ttl`` of its own.
        """
        peer = self._peers.get(name)
        if peer is None:
            return None
        if peer.greeted and now - peer.heard_at < FAMILIAR_SECONDS:
            return None
        proof = b""
        if self._token is not None:
            proof = self._token.introduction(self._local.agent_name, name)
        return Hello(self._encoded, proof)

    def greet(self, name: AgentName, hello: Hello, now: float) -> Peer:
        """Admit the sender of a notification that introduces itself.

        Raises:
            WireError: it is not who it says, or does not hold the token.
            AgentError: NIXL does not accept it.
        """
        info = decode_rank(hello.rank)
        if info.agent_name != name:
            raise WireError(f"it introduces itself as {info.agent_name!r}")
        if not introduced(self._token, hello.proof, name, self._local.agent_name):
            raise WireError("it does not hold the side_channel_token_file")
        self._replace_old(info, None, now)
        peer = self._admit_peer(info, now)
        peer.greeted = True
        return peer

    def heard(self, name: AgentName, peer: Peer, now: float) -> None:
        """A message of a peer has arrived."""
        peer.used_at = peer.heard_at = now
        self._liveness.heard(name, now)
        if peer.lost:
            logger.info("Agent %s of engine %s is back", name, peer.info.engine_id)
            peer.lost = peer.broken = False

    def excuse(self, now: float) -> None:
        """This process was stopped or starved; the silence was its own."""
        self._liveness.excuse(now)

    def broken(self, name: AgentName, reason: str) -> None:
        """The transport has given up the connection to a peer."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.broken = True
            self._lose(name, peer, reason)

    def left(self, name: AgentName) -> None:
        """A peer has ended all its transfers and taken its leave."""
        self._gone(name, "the engine was shut down")

    def tick(self, owing: Iterable[AgentName], now: float) -> list[AgentName]:
        """Judge the peers that owe an answer. Returns those to be pinged."""
        judged = [name for name in owing if self.usable(name) is not None]
        ping, silent = self._liveness.tick(judged, now)
        for name in silent:
            peer = self._peers.get(name)
            if peer is not None:
                self._lose(name, peer, f"no answer for {self._config.peer_timeout:g} s")
        if now >= self._next_probe:
            self._next_probe = now + PROBE_SECONDS
            for address in self._peers.lost_at():
                self._handshakes.start(address, now)
        for name in self._peers.provably_gone(now):
            self._gone(name, "its process has ended")
        return ping

    def expendable(self, now: float) -> list[AgentName]:
        """Peers unused for ``engine_ttl``."""
        return self._peers.idle_since(now - self._config.engine_ttl)

    def all(self) -> list[AgentName]:
        """Every known peer."""
        return self._peers.idle_since(float("inf"))

    def drop(self, name: AgentName) -> None:
        """Forget a peer of which nothing is open."""
        self._forget_engine(name)
        self._liveness.forget(name)
        self._peers.remove(name)

    def close(self) -> None:
        """Abandon handshakes."""
        self._handshakes.close()

    # ---- internals

    def _handshaken(self, handshake: Handshake, now: float) -> None:
        address = handshake.address
        wanted = address in self._wanted
        self._wanted.discard(address)
        failure = handshake.failure or self._admit(handshake, now)
        if failure is None:
            self._events.append(EngineUp(address, self._engines[address]))
        elif wanted:
            logger.warning("%s", failure)
            self._events.append(EngineDown(address, failure))
        else:
            logger.debug("Probe: %s", failure)

    def _admit(self, handshake: Handshake, now: float) -> str | None:
        where = f"{handshake.address[0]}:{handshake.address[1]}"
        if not handshake.ranks:
            return f"the engine at {where} has no workers"
        for info in handshake.ranks:
            self._replace_old(info, handshake.address, now)
        engine = self._pair(handshake.ranks)
        # Where they cannot be paired, a rank's description may tell why.
        known = None if isinstance(engine, str) else engine.all
        try:
            for info in handshake.ranks:
                if known is not None and info.agent_name not in known:
                    continue
                peer = self._admit_peer(info, now)
                peer.addresses.add(handshake.address)
                # It gets another chance to answer, and is judged anew.
                peer.lost = False
                if peer.refusal is not None:
                    return f"handshake with {where} refused: {peer.refusal}"
        except AgentError as error:
            return f"handshake with {where} failed: {error}"
        if isinstance(engine, str):
            return f"handshake with {where} failed: {engine}"
        self._engines[handshake.address] = engine
        return None

    def _admit_peer(self, info: RankInfo, now: float) -> Peer:
        known = self._peers.get(info.agent_name) is not None
        peer = self._peers.admit(info, now)
        if not known and peer.refusal is None and self._copies(info):
            reason = why_not_copied(
                self._local.process, info.process, info.regions[0].address
            )
            if reason is not None:
                logger.warning(
                    "KV to and from engine %s on this host goes by TCP, which is "
                    "slower: UCX cannot copy between the two processes, because %s",
                    info.engine_id,
                    reason,
                )
        return peer

    def _copies(self, info: RankInfo) -> bool:
        """Whether UCX would copy between two processes of one host."""
        transports = os.environ.get("UCX_TLS", "cma")
        memory = (self._local.mem_type, info.mem_type)
        return (
            "UCX" in self._config.backends
            and memory == ("DRAM", "DRAM")
            and "cma" in transports.split(",")
        )

    def _pair(self, ranks: tuple[RankInfo, ...]) -> Engine | str:
        """What this rank has to do with an engine, or why that cannot be told."""
        try:
            return Engine(self._peers.sources(ranks), self._peers.idle(ranks))
        except (AgentError, TopologyError) as error:
            return str(error)

    def _replace_old(self, info: RankInfo, address: Address | None, now: float) -> None:
        for name in self._peers.superseded_by(info, address):
            old = self._peers.get(name)
            if old is not None and old.ended_at is None:
                old.ended_at = now
                self._lose(name, old, "the engine was restarted")

    def _lose(self, name: AgentName, peer: Peer, reason: str) -> None:
        self._forget_engine(name)
        if peer.lost:
            return
        peer.lost = True
        logger.warning(
            "Agent %s of engine %s is lost: %s", name, peer.info.engine_id, reason
        )
        self._events.append(
            PeerLost(name, f"the engine {peer.info.engine_id} was lost: {reason}")
        )

    def _gone(self, name: AgentName, reason: str) -> None:
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.lost = True
        self._forget_engine(name)
        self._liveness.forget(name)
        self._events.append(
            PeerGone(name, f"the engine {peer.info.engine_id} is gone: {reason}")
        )

    def _forget_engine(self, name: AgentName) -> None:
        for address, engine in list(self._engines.items()):
            if name in engine.all:
                del self._engines[address]
