# SPDX-License-Identifier: Apache-2.0
"""The rows of prepared lists: no more pieces than the layouts ask for."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from v1.kv_connector.unit.nixl.simulated_memory import Layer, Side, build
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.compat import refusal
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import Lists, pair_ranks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pairing import PairingError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import plan
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RankInfo

LAYERS = tuple(Layer(f"l{i}", 4, 8) for i in range(4))
LATENTS = tuple(Layer(f"l{i}", 1, 8) for i in range(4))
BLOCK = Side().block


def _ranks(side: Side, layers: tuple[Layer, ...] = LAYERS) -> list[RankInfo]:
    made = build("engine", side, layers, np.random.default_rng(0))
    return [rank.info for rank in made]


def _lists(
    here: Side, there: Side, layers: tuple[Layer, ...] = LAYERS, parts: int = 1
) -> Lists:
    return pair_ranks(_ranks(here, layers)[0], _ranks(there, layers)[0], True, parts)


def _descriptors(lists: Lists, tokens: int = 4 * BLOCK) -> int:
    """For a prompt in blocks that follow each other on both sides."""
    want = Want(tokens, 0, tokens, b"")
    total = 0
    for part in lists.parts:
        group = part.groups[0]
        assert group is not None
        local, remote = (
            [np.arange(1, 1 + len(want.block_range(side.tokens)), dtype=np.int32)]
            for side in (group.local, group.remote)
        )
        pieces = plan(part, want, local, remote, 1 << 30)
        total += sum(piece.descriptors for piece in pieces)
    return total


@pytest.mark.parametrize(
    ("here", "there", "rows", "descriptors"),
    [
        # A layer of all neighbouring blocks is one piece, where all is equal.
        (Side(), Side(), 4, 4),
        (Side(tp=2), Side(tp=2), 4, 4),
        (Side(kernel_blocks=2), Side(kernel_blocks=2), 4, 4),
        (Side(layout="LBNHC"), Side(layout="LBNHC"), 4, 4),
        # Of some heads, each block of each layer is one.
        (Side(tp=1), Side(tp=2), 4, 16),
        (Side(tp=4), Side(tp=1), 4, 16),
        # A pipeline stage has a part of the layers.
        (Side(pp=2), Side(), 2, 2),
        # Tokens of unequal blocks: a piece per head.
        (Side(block=BLOCK), Side(block=BLOCK // 2), 16, 128),
        # A block of all layers is one piece where they lie together.
        (Side(layout="BLHNC"), Side(layout="BLHNC"), 1, 1),
        (Side(layout="BLHNC", pp=2), Side(layout="BLHNC"), 1, 4),
        (Side(layout="BLHNC"), Side(layout="LBHNC"), 4, 16),
        (Side(layout="BLHNC", tp=2), Side(layout="BLHNC"), 4, 16),
    ],
)
def test_pieces_are_as_few_as_can_be(
    here: Side, there: Side, rows: int, descriptors: int
) -> None:
    lists = _lists(here, there)
    (part,) = lists.parts
    (group,) = part.groups
    assert group is not None
    assert len(group.local.bases) == len(group.remote.bases) == rows
    assert _descriptors(lists) == descriptors


def test_latents_of_unequal_blocks_join() -> None:
    """One head: the tokens of neighbouring blocks follow each other on both sides."""
    lists = _lists(Side(block=8), Side(block=2), LATENTS)
    assert len(lists.local) == len(lists.remote) == 4
    assert _descriptors(lists) == 4
    apart = _lists(Side(block=8, layout="BLHNC"), Side(block=2), LATENTS)
    # Blocks lie apart here; in each of them four units follow each other.
    assert _descriptors(apart) == 4 * 4


def test_layers_that_move_in_different_parts_are_not_joined() -> None:
    lists = _lists(Side(layout="BLHNC"), Side(layout="BLHNC"), parts=2)
    assert [len(g.local.bases) for p in lists.parts for g in p.groups if g] == [1, 1]
    assert _descriptors(lists) == 8


def test_replicated_heads_move_once() -> None:
    (reader,) = _ranks(Side(tp=1), LATENTS)
    givers = _ranks(Side(tp=4), LATENTS)
    moved = [pair_ranks(reader, giver, local_gives=False).local for giver in givers]
    assert [len(rows) for rows in moved] == [4, 0, 0, 0]


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (
            Side(layout="LBNHC", tp=2),
            Side(layout="LBNHC"),
            "choose VLLM_KV_CACHE_LAYOUT=LBHNC",
        ),
        (Side(block=8), Side(block=12), "8 (local) and 12 (remote)"),
        (Side(layout="CPU"), Side(), "tokens lie differently"),
    ],
)
def test_what_cannot_be_paired_is_refused(here: Side, there: Side, said: str) -> None:
    mine = _ranks(here)[0]
    theirs = _ranks(there)[0]
    reason = refusal(mine, theirs, enforce=True) or ""
    assert said in reason


def test_heads_that_do_not_divide_are_refused() -> None:
    theirs = msgspec.structs.replace(_ranks(Side())[0], tp_size=3)
    reason = refusal(_ranks(Side())[0], theirs, enforce=True) or ""
    assert "4 KV heads cannot be divided over tensor_parallel_size 3" in reason


def test_another_number_of_heads_is_refused() -> None:
    mine = _ranks(Side())[0]
    more = tuple(replace(layer, heads=8) for layer in LAYERS)
    reason = refusal(mine, _ranks(Side(), more)[0], enforce=True) or ""
    assert "KV heads of layer l0 differ (local 4, remote 8)" in reason


def test_a_list_that_an_index_cannot_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = Side().blocks
    monkeypatch.setattr(pages, "INDEX_LIMIT", 4 * blocks)
    _lists(Side(), Side())
    monkeypatch.setattr(pages, "INDEX_LIMIT", 4 * blocks - 1)
    with pytest.raises(PairingError, match="longer than an index"):
        _lists(Side(), Side())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"page_bytes": 0}, "0 bytes in"),
        ({"page_bytes": 255}, "255 bytes in 4 lanes"),
        ({"lanes": 3}, "256 bytes in 3 lanes"),
        ({"lanes": 2}, "4 heads in 2 lanes"),
        ({"kernel_blocks": 0}, "bytes in 0 lanes"),
        ({"tokens": 9, "kernel_blocks": 2}, "9 tokens in 2 kernel blocks"),
        ({"address": 2**63}, "pages 256 bytes apart from 9223372036854775808"),
        ({"address": -1}, "pages 256 bytes apart from -1"),
        ({"stride": -1}, "pages -1 bytes apart"),
        ({"heads": 2, "lanes": 1}, "2 of 4 KV heads"),
        ({"num_blocks": 5}, "another number of blocks"),
        ({"group": -1}, "cache group of l0 differs"),
        ({"window": 7}, "with window 7"),
    ],
)
def test_what_a_peer_cannot_have_is_refused(changes: dict[str, int], said: str) -> None:
    mine, theirs = _ranks(Side())[0], _ranks(Side())[0]
    region = msgspec.structs.replace(theirs.regions[0], **changes)
    lying = msgspec.structs.replace(theirs, regions=(region, *theirs.regions[1:]))
    for gives in (True, False):
        with pytest.raises(PairingError, match=said):
            pair_ranks(mine, lying, gives)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"granule": 3}, "granules of 3 tokens in 8"),
        ({"granule": 0}, "granules of 0 tokens"),
        ({"rows": 2}, "ends at 64 of 64 bytes|planes of 128 bytes"),
        ({"offset": 2**62}, "a plane that ends at"),
        ({"granule_bytes": 4}, "planes of 32 bytes in 64"),
    ],
)
def test_planes_that_do_not_fill_a_lane_are_refused(
    changes: dict[str, int], said: str
) -> None:
    mine, theirs = _ranks(Side())[0], _ranks(Side(block=8))[0]
    first = theirs.regions[0]
    plane = msgspec.structs.replace(first.planes[0], **changes)
    region = msgspec.structs.replace(first, planes=(plane,))
    lying = msgspec.structs.replace(theirs, regions=(region, *theirs.regions[1:]))
    with pytest.raises(PairingError, match=said):
        pair_ranks(mine, lying, local_gives=True)
