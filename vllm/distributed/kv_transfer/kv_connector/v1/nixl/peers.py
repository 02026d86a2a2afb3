# SPDX-License-Identifier: Apache-2.0
"""The agents that this rank knows, and what it has prepared for them."""

from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from .agent import Agent, AgentError
from .compat import refusal
from .ids import AgentName
from .layout import Row
from .pages import Lists, pair_ranks
from .pairing import PairingError
from .process import is_gone
from .serving import count_readers, idle_of, sources_of
from .side_channel import Address
from .wire.ranks import RankInfo

logger = init_logger(__name__)

SETTLE_SECONDS = 0.5
MAX_PEERS = 16384


@dataclass(frozen=True)
class Prepared:
    """What two ranks share, and NIXL's handles of the two lists that name it."""

    lists: Lists
    local: Any
    remote: Any


@dataclass
class _Counted:
    prepared: Any
    users: int = 0


@dataclass
class Peer:
    """One remote worker rank.

    Attributes:
        refusal: why no KV is exchanged with it, if so.
        greeted: whether it has acknowledged this rank's description.
        addresses: side channels at which this rank was told of it.
        lost: it does not answer; it may do so again, or prove to be gone.
        broken: the transport has given its connection up.
        ended_at: when its end was first proven, if it was.
        used_at: when it was last spoken of; after ``engine_ttl`` it is forgotten.
        heard_at: when a message of it last arrived.
        readers: see :meth:`PeerDirectory.readers`; None until somebody asks.
    """

    info: RankInfo
    refusal: str | None
    greeted: bool = False
    addresses: set[Address] = field(default_factory=set)
    lost: bool = False
    broken: bool = False
    ended_at: float | None = None
    used_at: float = 0.0
    heard_at: float = float("-inf")
    readers: int | None = None
    prepared: dict[tuple[bool, int], Prepared] = field(default_factory=dict)


def _takes_the_place(new: RankInfo, old: RankInfo) -> bool:
    """Whether a rank stands where another did; the first, for all that are no more."""
    if (new.tp_rank, new.pp_rank) == (old.tp_rank, old.pp_rank):
        return True
    is_first = (new.tp_rank, new.pp_rank) == (0, 0)
    return is_first and (old.tp_rank >= new.tp_size or old.pp_rank >= new.pp_size)


class PeerDirectory:
    """Known peers by agent name.

    Args:
        agent: the local NIXL agent.
        local: this rank's own description.
        enforce: see :func:`.compat.refusal`.
    """

    def __init__(self, agent: Agent, local: RankInfo, enforce: bool) -> None:
        self._agent = agent
        self._local = local
        self._enforce = enforce
        self._peers: dict[AgentName, Peer] = {}
        self._lists: dict[tuple[Row, ...], _Counted] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: AgentName) -> Peer | None:
        """The peer of that name, if known."""
        return self._peers.get(name)

    def admit(self, info: RankInfo, now: float) -> Peer:
        """Make a peer known to NIXL and check whether KV can be exchanged.

        One whose connection had broken is connected anew.

        Raises:
            AgentError: NIXL does not accept its metadata, or it is this rank itself.
        """
        if info.agent_name == self._local.agent_name:
            raise AgentError(
                "this engine itself answers there: remote_host and remote_port must "
                "be those of the other engine's side channel"
            )
        known = self._peers.get(info.agent_name)
        if known is not None and not known.broken:
            known.used_at = now
            return known
        if known is not None:
            self.remove(info.agent_name)
        if len(self._peers) >= MAX_PEERS:
            raise AgentError(f"{MAX_PEERS} peers are known already")
        name = self._agent.add_peer(info.agent_metadata)
        if name != info.agent_name:
            if name not in self._peers:
                self._agent.remove_peer(name)
            raise AgentError(
                f"agent metadata belongs to {name!r}, not to {info.agent_name!r}"
            )
        reason = refusal(self._local, info, self._enforce)
        if reason is not None:
            logger.warning(
                "No KV is exchanged with engine %s (agent %s): %s",
                info.engine_id,
                info.agent_name,
                reason,
            )
        peer = Peer(info, reason, used_at=now)
        self._peers[info.agent_name] = peer
        return peer

    def prepared(self, name: AgentName, gives: bool, parts: int = 1) -> Prepared:
        """The descriptor lists of what this rank and a peer share, made at first use.

        Args:
            name: the peer.
            gives: whether KV goes to it; copies of a head are shared out otherwise in
                the other direction.
            parts: into how many parts the local layers are divided.

        Raises:
            AgentError: NIXL does not know the memory.
            PairingError, TopologyError: the layouts cannot be paired.
        """
        peer = self._peers[name]
        known = peer.prepared.get((gives, parts))
        if known is None:
            lists = pair_ranks(self._local, peer.info, gives, parts)
            if not lists.local:
                raise PairingError(
                    f"agent {name} gets nothing from this rank"
                    if gives
                    else f"agent {name} has nothing for this rank"
                )
            local = self._take_local(lists.local)
            try:
                remote = self._agent.prepare(lists.remote, peer.info.mem_type, name)
            except AgentError:
                self._give_local(lists.local)
                raise
            known = Prepared(lists, local, remote)
            peer.prepared[gives, parts] = known
        return known

    def _take_local(self, rows: tuple[Row, ...]) -> Any:
        """A list of local rows; peers of the same shape have it in common."""
        if rows not in self._lists:
            made = self._agent.prepare(rows, self._local.mem_type, None)
            self._lists[rows] = _Counted(made)
        counted = self._lists[rows]
        counted.users += 1
        return counted.prepared

    def _give_local(self, rows: tuple[Row, ...]) -> None:
        counted = self._lists[rows]
        counted.users -= 1
        if not counted.users:
            del self._lists[rows]
            self._agent.release_prepared(counted.prepared)

    def sources(self, ranks: tuple[RankInfo, ...]) -> tuple[AgentName, ...]:
        """Of one engine's ranks, those that have something for this rank.

        Raises:
            TopologyError: the layouts cannot be paired, or layers are missing.
            AgentError: a rank is missing.
        """
        return sources_of(self._local, ranks)

    def readers(self, peer: AgentName) -> int:
        """How many ranks of a known peer's engine ask this rank for KV.

        Each of its pipeline stages asks for its own layers. Layers are taken to have
        the same numbers of heads in all stages.

        Raises:
            TopologyError: the layouts cannot be paired.
        """
        known = self._peers[peer]
        if known.readers is None:
            # Asked for with every message.
            known.readers = count_readers(self._local, known.info)
        return known.readers

    def idle(self, ranks: tuple[RankInfo, ...]) -> tuple[AgentName, ...]:
        """Of one engine's ranks, those that no rank of this engine asks.

        Only this engine's first rank names them; for the others there are none, so
        that they are told once.

        Raises:
            TopologyError: the layouts cannot be paired.
        """
        return idle_of(self._local, ranks)

    def superseded_by(self, info: RankInfo, address: Address | None) -> list[AgentName]:
        """Agents that are proven gone by what ``info`` says.

        Either their process on this host has ended, or ``info`` was told at the
        address where they used to be, by a process of the same host: it could not
        listen there while they did. An agent that was told of at several addresses
        has none that proves this; a client may name any address to a decode engine.
        """
        return [
            name
            for name, peer in self._peers.items()
            if name != info.agent_name
            and _takes_the_place(info, peer.info)
            and (
                (
                    peer.info.engine_id == info.engine_id
                    and is_gone(self._local.process, peer.info.process)
                )
                or (
                    address is not None
                    and peer.addresses == {address}
                    and bool(info.process.boot_id)
                    and peer.info.process.boot_id == info.process.boot_id
                )
            )
        ]

    def lost_at(self) -> set[Address]:
        """Where to ask whether a lost peer is back, or another is in its place."""
        return {
            address
            for peer in self._peers.values()
            if peer.lost
            for address in peer.addresses
        }

    def provably_gone(self, now: float) -> list[AgentName]:
        """Lost peers whose end was proven a while ago.

        What a dead process has sent over TCP is still in this host's socket, and is
        put into memory by this process's own progress: the wait lets that happen.
        """
        gone: list[AgentName] = []
        for name, peer in self._peers.items():
            if not peer.lost:
                continue
            if peer.ended_at is None and is_gone(
                self._local.process, peer.info.process
            ):
                peer.ended_at = now
            if peer.ended_at is not None and now - peer.ended_at > SETTLE_SECONDS:
                gone.append(name)
        return gone

    def idle_since(self, limit: float) -> list[AgentName]:
        """Peers that were last used before ``limit``."""
        return [name for name, peer in self._peers.items() if peer.used_at < limit]

    def remove(self, name: AgentName) -> None:
        """Forget a peer; the caller has ended all that concerns it."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        try:
            for prepared in peer.prepared.values():
                self._give_local(prepared.lists.local)
                self._agent.release_prepared(prepared.remote)
            self._agent.remove_peer(name)
        except AgentError as error:
            logger.debug("removing agent %s: %s", name, error)
