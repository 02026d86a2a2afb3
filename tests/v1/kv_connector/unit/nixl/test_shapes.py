# SPDX-License-Identifier: Apache-2.0
"""What is known of each layer from the engine's own description of its caches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    LayerShape,
    dense,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.shapes import layer_shapes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

COMMON: dict[str, Any] = {"block_size": 16, "head_size": 32, "dtype": torch.bfloat16}


def _shapes(
    *groups: dict[str, KVCacheSpec] | KVCacheSpec,
    tp_size: int = 1,
    model_heads: int = 8,
    backend: str = "FLASH_ATTN",
) -> dict[str, LayerShape]:
    """Of groups of one layer ``l0``, ``l1`` each, or of several with their names."""
    made: list[KVCacheGroupSpec] = []
    for index, group in enumerate(groups):
        if isinstance(group, KVCacheSpec):
            made.append(KVCacheGroupSpec([f"l{index}"], group))
        else:
            whole = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=group)
            made.append(KVCacheGroupSpec(list(group), whole))
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        isa="vec",
        kv_cache_dtype="auto",
    )
    names = [name for group in made for name in group.layer_names]
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys(names, layer)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: model_heads, dtype=torch.bfloat16
        ),
    )
    return layer_shapes(config, KVCacheConfig(8, [], made))


@pytest.mark.parametrize(
    ("held", "tp_size", "model_heads", "expected"),
    [
        (8, 1, 8, 8),
        (2, 4, 8, 8),
        (1, 8, 2, 2),
        # Not those of the model, as a draft model's: taken to be divided.
        (3, 2, 8, 6),
        (4, 1, 8, 4),
    ],
)
def test_heads_over_all_ranks(
    held: int, tp_size: int, model_heads: int, expected: int
) -> None:
    spec = FullAttentionSpec(num_kv_heads=held, **COMMON)
    shape = _shapes(spec, tp_size=tp_size, model_heads=model_heads)["l0"]
    assert (shape.heads, shape.model_heads, shape.tokens) == (held, expected, 16)
    assert shape.heads_apart
    assert shape.packing is dense


def test_latents_and_indexers_are_one_head_of_the_same_tokens() -> None:
    latent = MLAAttentionSpec(num_kv_heads=1, **COMMON)
    indexer = MLAAttentionSpec(
        num_kv_heads=1,
        block_size=16,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    layers = {"l0.attn": latent, "l0.indexer": indexer}
    shapes = _shapes(layers, tp_size=4, backend="FLASHMLA")
    assert {shape.model_heads for shape in shapes.values()} == {1}
    assert shapes["l0.attn"].packing is dense
    # Scales lie apart from values: tokens are not moved one by one.
    assert shapes["l0.indexer"].packing is None


def test_windows_and_groups() -> None:
    shapes = _shapes(
        FullAttentionSpec(num_kv_heads=8, **COMMON),
        SlidingWindowSpec(num_kv_heads=8, sliding_window=128, **COMMON),
        ChunkedLocalAttentionSpec(num_kv_heads=8, attention_chunk_size=64, **COMMON),
    )
    assert [(s.group, s.window) for s in shapes.values()] == [(0, 0), (1, 128), (2, 1)]


@pytest.mark.parametrize(
    ("changes", "backend", "apart"),
    [
        ({"kv_quant_mode": KVQuantMode.NVFP4}, "FLASHINFER", False),
        ({"num_head_slots": 2}, "FLASH_ATTN", False),
        ({"state_content_bytes": 96}, "TRITON_ATTN", True),
        ({"tokens_per_state": 4}, "FLASH_ATTN", True),
        ({}, "SOME_OTHER", True),
    ],
)
def test_tokens_of_what_is_not_known_are_not_told_apart(
    changes: dict[str, Any], backend: str, apart: bool
) -> None:
    spec = FullAttentionSpec(num_kv_heads=8, **COMMON, **changes)
    shape = _shapes(spec, backend=backend)["l0"]
    assert shape.packing is None
    assert shape.heads_apart is apart


def test_pages_for_the_cpu_kernels_are_measured() -> None:
    spec = FullAttentionSpec(num_kv_heads=8, **{**COMMON, "block_size": 32})
    shapes = _shapes(spec, backend="CPU_ATTN")
    cache = torch.zeros(8, 8, 32, 64, dtype=torch.bfloat16)
    (region,) = describe({"l0": cache}, 8, shapes).regions
    assert region.lanes == 8
    assert [plane.rows for plane in region.planes] == [32, 1]


def _heads_in_one_piece(cache: torch.Tensor) -> tuple[int, int]:
    shape = LayerShape(tokens=4, heads=2, model_heads=2, packing=dense)
    (region,) = describe({"l": cache}, len(cache), {"l": shape}).regions
    return region.lanes, len(region.planes)


def test_where_heads_lie_is_seen_in_the_tensor() -> None:
    assert _heads_in_one_piece(torch.zeros(3, 2, 4, 6)) == (2, 1)
    tokens_outside = torch.zeros(3, 4, 2, 6).transpose(1, 2)
    assert _heads_in_one_piece(tokens_outside) == (1, 1)
    # Slots that are not heads are not taken apart, nor are tokens across them.
    assert _heads_in_one_piece(torch.zeros(3, 4, 4, 6)) == (1, 0)


@pytest.mark.parametrize(
    ("extra", "mla", "expected"),
    [
        ({}, False, "LBHNC"),
        ({}, True, None),
        ({"enable_cross_layers_blocks": True}, False, "BLHNC"),
        ({"enable_cross_layers_blocks": True}, True, "BLHNC"),
    ],
)
def test_the_layout_that_is_asked_for(
    extra: dict[str, bool], mla: bool, expected: str | None
) -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(use_mla=mla),
    )
    found = NixlPushConnector.get_required_kvcache_layout(config)
    assert found == expected
