# SPDX-License-Identifier: Apache-2.0
"""Groups of layers, as a forward pass goes through them."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.layer_parts import (
    LayerParts,
)


def _parts(count: int) -> LayerParts:
    regions = [RegionInfo(layer, 0, 0, 1, 1, 1, 0) for layer in "abcd"]
    parts = LayerParts(regions, count)
    parts.begin()
    return parts


def test_a_group_is_told_with_its_last_layer() -> None:
    parts = _parts(2)
    assert [list(parts.done(layer)) for layer in "abcd"] == [[], [0], [], [1]]
    assert list(parts.rest()) == []


def test_groups_are_told_in_their_order() -> None:
    parts = _parts(2)
    assert [list(parts.done(layer)) for layer in "cdab"] == [[], [], [], [0, 1]]


def test_what_a_pass_does_not_say_is_told_at_its_end() -> None:
    parts = _parts(4)
    assert list(parts.done("a")) == [0]
    assert list(parts.rest()) == [1, 2, 3]
    assert list(parts.done("b")) == []
    parts.begin()
    assert list(parts.done("a")) == [0]


def test_layers_without_a_cache_and_repeated_ones_change_nothing() -> None:
    parts = _parts(2)
    assert [list(parts.done(layer)) for layer in "axab"] == [[], [], [], [0]]
    assert list(parts.done("a")) == []


def test_there_are_not_more_groups_than_layers() -> None:
    assert _parts(9).parts == 4
