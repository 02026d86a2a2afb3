# SPDX-License-Identifier: Apache-2.0
"""What a peer must know of a worker rank: who it is, and how its caches lie."""

from typing import Annotated

import msgspec

from ..ids import AgentName, EngineId
from .codec import SHORT, Count, Size, decode

MAX_RANK_BYTES = 4 << 20
"""Largest encoded :class:`RankInfo`: its receiver keeps it."""


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """A part of what one lane of a page holds of its tokens, say their keys.

    Granule ``i`` is ``granule`` tokens, and of them ``granule_bytes`` bytes in each of
    ``rows`` rows: at ``offset + row * row_stride + i * granule_bytes`` of the lane.
    ``order`` tells the order of those bytes, where it is not that of tokens.
    """

    offset: Size
    rows: Count
    row_stride: Size
    granule: Count
    granule_bytes: Size
    order: Annotated[str, msgspec.Meta(max_length=64)] = ""


class RegionInfo(msgspec.Struct, frozen=True, array_like=True):
    """One layer's cache: ``num_blocks`` pages of ``page_bytes``, evenly spaced.

    Addresses and sizes are in bytes; ``group`` indexes the KV cache group whose
    block table addresses the pages.

    A page is for ``tokens`` tokens. It consists of ``kernel_blocks`` equal pieces, each
    for so many consecutive tokens, and such a piece of ``lanes`` equal lanes. Where
    heads lie outside tokens, a lane is one of the ``heads`` KV heads that this rank
    has of the layer's ``model_heads``; otherwise there is one lane. ``planes`` tells
    how tokens lie in a lane; where it is empty, they cannot be told apart, and pages
    move whole. ``window`` is the number of tokens at the end of a prompt that the layer
    keeps for sure; block 0 then stands for no block. It is 0 where all are kept.
    """

    layer: str
    group: int
    address: int
    page_bytes: int
    stride: int
    num_blocks: int
    device_id: int
    tokens: Count = 0
    heads: Count = 1
    model_heads: Count = 1
    lanes: Count = 1
    kernel_blocks: Count = 1
    planes: tuple[Plane, ...] = ()
    window: Count = 0


class ProcessInfo(msgspec.Struct, frozen=True, array_like=True):
    """What identifies a process on its host, to tell later whether it is gone."""

    boot_id: str
    pid: int
    start_ticks: int


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """All that a peer must know of one worker rank.

    ``compat`` holds the facts that must be equal on both sides, by the name
    under which a refusal reports them; ``layout`` those that must be equal even
    where compatibility is not enforced; ``transport`` those that are told to people.
    """

    protocol: int
    engine_id: Annotated[EngineId, SHORT]
    agent_name: Annotated[AgentName, SHORT]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    block_size: int
    mem_type: str
    agent_metadata: bytes
    regions: tuple[RegionInfo, ...]
    compat: dict[str, str]
    layout: dict[str, str]
    process: ProcessInfo
    transport: dict[str, str] = {}


_rank_decoder = msgspec.msgpack.Decoder(RankInfo)


def decode_rank(data: bytes) -> RankInfo:
    """Decode a worker's description; raises :class:`.WireError`."""
    return decode(_rank_decoder, data, "rank description", MAX_RANK_BYTES)
