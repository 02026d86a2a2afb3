# SPDX-License-Identifier: Apache-2.0
"""Which ranks of another engine serve a rank, by what the ranks hold.

Tensor-parallel ranks are a matter of arithmetic (:mod:`.topology`); which layers a
pipeline stage holds is what its ranks say.
"""

from . import topology
from .agent import AgentError
from .ids import AgentName
from .topology import RankShape, TopologyError
from .wire.ranks import RankInfo


def shape_of(info: RankInfo) -> RankShape:
    """The place that a rank has given."""
    return RankShape(info.tp_rank, info.tp_size, info.pp_rank, info.pp_size)


def layers_of(info: RankInfo) -> frozenset[str]:
    """The layers that a rank has KV of."""
    return frozenset(region.layer for region in info.regions)


def heads_in(info: RankInfo, layers: frozenset[str] | None = None) -> frozenset[int]:
    """The numbers of KV heads that these layers (all, if None) have in the model."""
    return frozenset(
        region.model_heads
        for region in info.regions
        if layers is None or region.layer in layers
    )


def sources_of(local: RankInfo, ranks: tuple[RankInfo, ...]) -> tuple[AgentName, ...]:
    """Of one engine's ranks, those that have something for ``local``.

    Raises:
        TopologyError: the layouts cannot be paired, or layers are missing.
        AgentError: a rank is missing.
    """
    by_place = {(rank.pp_rank, rank.tp_rank): rank for rank in ranks}
    stages = {rank.pp_rank: rank for rank in ranks}
    wanted = layers_of(local)
    missing = wanted.difference(*(layers_of(rank) for rank in ranks))
    if missing:
        raise TopologyError(
            f"layers on one side only: {_some(missing)}; the engine "
            f"{ranks[0].engine_id} has told of {len(stages)} of its "
            f"{ranks[0].pp_size} pipeline stages"
        )
    places: list[tuple[int, int]] = []
    for stage, rank in sorted(stages.items()):
        shared = wanted & layers_of(rank)
        if shared:
            heads = heads_in(local, shared)
            found = topology.sources(shape_of(local), rank.tp_size, heads)
            places += [(stage, tp_rank) for tp_rank in found]
    absent = [place for place in places if place not in by_place]
    if absent:
        raise AgentError(
            f"the engine {ranks[0].engine_id} did not describe its ranks "
            f"(pipeline stage, tensor-parallel rank) {absent}"
        )
    return tuple(by_place[place].agent_name for place in places)


def count_readers(local: RankInfo, peer: RankInfo) -> int:
    """How many ranks of ``peer``'s engine ask ``local`` for KV.

    Raises:
        TopologyError: the layouts cannot be paired.
    """
    asking = topology.readers(shape_of(local), peer.tp_size, heads_in(local))
    return len(asking) * peer.pp_size


def idle_of(local: RankInfo, ranks: tuple[RankInfo, ...]) -> tuple[AgentName, ...]:
    """Of one engine's ranks, those that no rank of ``local``'s engine asks.

    There are none unless ``local`` is its engine's first rank.

    Raises:
        TopologyError: the layouts cannot be paired.
    """
    if local.tp_rank or local.pp_rank:
        return ()
    return tuple(
        rank.agent_name
        for rank in ranks
        if rank.tp_rank in topology.idle(local.tp_size, rank.tp_size, heads_in(rank))
    )


def _some(names: frozenset[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (" …" if len(shown) > 4 else "")
