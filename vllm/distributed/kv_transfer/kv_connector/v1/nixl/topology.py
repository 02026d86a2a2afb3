# SPDX-License-Identifier: Apache-2.0
"""Which remote ranks hold the KV that a rank needs, and which heads each gives.

Over ``tp_size`` ranks, a layer of ``heads`` KV heads is divided where there are heads
enough, and replicated where there are not: rank ``r`` holds ``heads / tp_size`` heads
in their order, or the one head ``r * heads // tp_size``. A latent (MLA) is one head.
Which layers a rank holds is not a matter of arithmetic; ranks describe themselves.
"""

from collections.abc import Collection
from dataclasses import dataclass


class TopologyError(ValueError):
    """A pairing of parallel layouts that is not supported."""


@dataclass(frozen=True)
class RankShape:
    """A rank's place in its engine."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


def heads_of(tp_rank: int, tp_size: int, heads: int) -> range:
    """The heads of a layer that a rank holds, numbered over the model.

    Raises:
        TopologyError: neither divides the other.
    """
    if heads >= 1 and heads % tp_size == 0:
        each = heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    if heads >= 1 and tp_size % heads == 0:
        head = tp_rank * heads // tp_size
        return range(head, head + 1)
    raise TopologyError(
        f"{heads} KV heads cannot be divided over tensor_parallel_size {tp_size}, nor "
        "replicated evenly; one must be a multiple of the other"
    )


def slices(local: RankShape, remote_tp: int, heads: int) -> dict[int, range]:
    """Per remote tensor-parallel rank, the heads that ``local`` gets from it.

    Each head comes from one rank. Where several hold it, the local ranks that want it
    are spread over them in their order; with equal sizes, rank i serves rank i.

    Raises:
        TopologyError: see :func:`heads_of`.
    """
    heads_of(0, remote_tp, heads)
    found: dict[int, range] = {}
    for head in heads_of(local.tp_rank, local.tp_size, heads):
        holders = _holders(head, remote_tp, heads)
        wanting = _holders(head, local.tp_size, heads)
        turn = (local.tp_rank - wanting.start) * len(holders) // len(wanting)
        rank = holders[turn]
        known = found.get(rank)
        found[rank] = range(head if known is None else known.start, head + 1)
    return found


def sources(
    local: RankShape, remote_tp: int, heads: Collection[int]
) -> tuple[int, ...]:
    """The remote tensor-parallel ranks that ``local`` gets something from.

    ``heads`` are the numbers of KV heads that the model's layers have.

    Raises:
        TopologyError: see :func:`heads_of`.
    """
    return tuple(sorted({r for n in heads for r in slices(local, remote_tp, n)}))


def readers(
    local: RankShape, remote_tp: int, heads: Collection[int]
) -> tuple[int, ...]:
    """The remote tensor-parallel ranks that get something from ``local``.

    Raises:
        TopologyError: see :func:`heads_of`.
    """
    return tuple(
        rank
        for rank in range(remote_tp)
        if local.tp_rank in sources(RankShape(rank, remote_tp), local.tp_size, heads)
    )


def idle(local_tp: int, remote_tp: int, heads: Collection[int]) -> tuple[int, ...]:
    """The remote tensor-parallel ranks that no rank of the local engine asks.

    Raises:
        TopologyError: see :func:`heads_of`.
    """
    asked = {
        source
        for rank in range(local_tp)
        for source in sources(RankShape(rank, local_tp), remote_tp, heads)
    }
    return tuple(rank for rank in range(remote_tp) if rank not in asked)


def _holders(head: int, tp_size: int, heads: int) -> range:
    if tp_size <= heads:
        rank = head * tp_size // heads
        return range(rank, rank + 1)
    copies = tp_size // heads
    return range(head * copies, (head + 1) * copies)
