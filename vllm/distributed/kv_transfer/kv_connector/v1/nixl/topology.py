# SPDX-License-Identifier: Apache-2.0
"""Which remote ranks hold the KV that a rank needs.

Supported: tensor-parallel size 1 on both sides. Other shapes are refused here,
and only here.
"""

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


def source_ranks(local: RankShape, remote: RankShape) -> tuple[tuple[int, int], ...]:
    """The ``(pp_rank, tp_rank)`` of the remote engine that serve ``local``.

    Raises:
        TopologyError: naming the size that is not supported.
    """
    for name, mine, other in (
        ("tp_size", local.tp_size, remote.tp_size),
        ("pp_size", local.pp_size, remote.pp_size),
    ):
        if mine != 1 or other != 1:
            raise TopologyError(
                f"{name} {mine} (local) with {other} (remote) is not supported; "
                "both must be 1"
            )
    return ((0, 0),)
