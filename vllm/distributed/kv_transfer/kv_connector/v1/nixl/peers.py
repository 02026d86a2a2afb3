# SPDX-License-Identifier: Apache-2.0
"""The agents that this rank knows, and what it has prepared for them."""

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from .agent import Agent, AgentError
from .compat import refusal
from .ids import AgentName, EngineId
from .process import is_gone
from .topology import RankShape, source_ranks
from .wire import RankInfo

logger = init_logger(__name__)


@dataclass
class Peer:
    """One remote worker rank.

    Attributes:
        refusal: why no KV is exchanged with it, if so.
        greeted: whether it has acknowledged this rank's description.
        lost: it does not answer, and is kept only until its end is proven.
    """

    info: RankInfo
    refusal: str | None
    greeted: bool = False
    lost: bool = False
    used_at: float = 0.0
    prepared: Any = None


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

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, name: AgentName) -> Peer | None:
        """The peer of that name, if known."""
        return self._peers.get(name)

    def admit(self, info: RankInfo, now: float) -> Peer:
        """Make a peer known to NIXL and check whether KV can be exchanged.

        Raises:
            AgentError: NIXL does not accept its metadata.
        """
        known = self._peers.get(info.agent_name)
        if known is not None and not known.lost:
            known.used_at = now
            return known
        if known is not None:
            self.remove(info.agent_name)
        name = self._agent.add_peer(info.agent_metadata)
        if name != info.agent_name:
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

    def prepared(self, name: AgentName) -> Any:
        """The descriptor list of a peer's pages, prepared at first use.

        The peer's regions are put into the order of the local ones, so that one
        index arithmetic serves both.

        Raises:
            AgentError: NIXL does not know the memory.
        """
        peer = self._peers[name]
        if peer.prepared is None:
            by_layer = {region.layer: region for region in peer.info.regions}
            regions = [by_layer[region.layer] for region in self._local.regions]
            peer.prepared = self._agent.prepare(regions, peer.info.mem_type, name)
        return peer.prepared

    def sources(self, ranks: tuple[RankInfo, ...]) -> tuple[AgentName, ...]:
        """Of one engine's ranks, those that serve this rank.

        Raises:
            TopologyError: the layouts cannot be paired.
            AgentError: a rank is missing.
        """
        by_place = {(rank.pp_rank, rank.tp_rank): rank for rank in ranks}
        shape = RankShape(
            self._local.tp_rank,
            self._local.tp_size,
            self._local.pp_rank,
            self._local.pp_size,
        )
        first = ranks[0]
        wanted = source_ranks(shape, RankShape(0, first.tp_size, 0, first.pp_size))
        missing = [place for place in wanted if place not in by_place]
        if missing:
            raise AgentError(f"the engine did not describe its ranks {missing}")
        return tuple(by_place[place].agent_name for place in wanted)

    def superseded_by(self, info: RankInfo) -> list[AgentName]:
        """Earlier incarnations of the same rank of the same engine and host."""
        return [
            name
            for name, peer in self._peers.items()
            if name != info.agent_name
            and peer.info.engine_id == info.engine_id
            and peer.info.tp_rank == info.tp_rank
            and peer.info.pp_rank == info.pp_rank
            and is_gone(self._local.process, peer.info.process)
        ]

    def provably_gone(self) -> list[AgentName]:
        """Lost peers whose process on this host has ended."""
        return [
            name
            for name, peer in self._peers.items()
            if peer.lost and is_gone(self._local.process, peer.info.process)
        ]

    def idle_since(self, limit: float) -> list[AgentName]:
        """Peers that were last used before ``limit``."""
        return [name for name, peer in self._peers.items() if peer.used_at < limit]

    def remove(self, name: AgentName) -> None:
        """Forget a peer; the caller has ended all that concerns it."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        try:
            if peer.prepared is not None:
                self._agent.release_prepared(peer.prepared)
            self._agent.remove_peer(name)
        except AgentError as error:
            logger.debug("removing agent %s: %s", name, error)

    def engine_of(self, name: AgentName) -> EngineId | None:
        """The engine that an agent belongs to, for logs."""
        peer = self._peers.get(name)
        return None if peer is None else peer.info.engine_id
