# SPDX-License-Identifier: Apache-2.0
"""What the engine knows of each layer's cache: heads, tokens, and how they lie."""

from collections.abc import Callable
from typing import Any, TypeAlias

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from ..layout import LayerShape, dense
from ..topology import TopologyError, heads_of
from ..wire.ranks import Plane
from .packing import CpuPacking

Packing: TypeAlias = Callable[[int, int], tuple[Plane, ...]]

_PLAIN = frozenset({KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})
"""With these a token's bytes are its content and nothing else."""

_TOKEN_BY_TOKEN = frozenset(
    {
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN",
        "FLASH_ATTN_MLA",
        "TRITON_ATTN",
        "TRITON_MLA",
    }
)
"""Attention backends that keep the content of each token of a head in one piece, in the
order of the tokens."""


def layer_shapes(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> dict[str, LayerShape]:
    """The shape of each layer that is transferred."""
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    found: dict[str, LayerShape] = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            found[name] = _shape(vllm_config, index, spec, context.get(name))
    return found


def _shape(
    vllm_config: VllmConfig, group: int, spec: KVCacheSpec, layer: Any
) -> LayerShape:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if not isinstance(spec, AttentionSpec):
        return LayerShape(group, spec.block_size, model_heads=tp_size)
    heads = spec.num_kv_heads
    return LayerShape(
        group=group,
        tokens=spec.block_size,
        heads=heads,
        model_heads=_model_heads(vllm_config, spec, tp_size),
        window=_window(spec),
        heads_apart=spec.num_heads == heads and spec.kv_quant_mode in _PLAIN,
        packing=_packing(vllm_config, spec, layer),
    )


def _window(spec: AttentionSpec) -> int:
    """Tokens that are there for sure, in a group that lets go of blocks; else 0."""
    if isinstance(spec, SlidingWindowSpec):
        window: int = spec.sliding_window
        return window
    return 1 if isinstance(spec, ChunkedLocalAttentionSpec) else 0


def _model_heads(vllm_config: VllmConfig, spec: AttentionSpec, tp_size: int) -> int:
    """KV heads over all ranks.

    The configuration tells those of the model. Layers that have others, a draft
    model's say, are taken to be divided over all ranks: equal sizes pair rank by rank,
    and where heads are in truth replicated, unequal sizes do not fit and are refused.
    """
    if isinstance(spec, MLAAttentionSpec) or spec.max_tp_shards == 1:
        return 1
    heads: int = spec.num_kv_heads
    if tp_size == 1:
        return heads
    total: int = vllm_config.model_config.get_total_num_kv_heads()
    try:
        if len(heads_of(0, tp_size, total)) == heads:
            return total
    except TopologyError:
        pass
    return heads * tp_size


def _packing(
    vllm_config: VllmConfig, spec: AttentionSpec, layer: Any
) -> Packing | None:
    if (
        layer is None
        or spec.num_heads != spec.num_kv_heads
        or spec.tokens_per_state != 1
        or spec.state_content_bytes is not None
        or spec.kv_quant_mode not in _PLAIN
        or getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
    ):
        return None
    backend = layer.get_attn_backend().get_name()
    if backend == "CPU_ATTN" and hasattr(layer, "isa"):
        return CpuPacking(
            str(layer.isa),
            spec.head_size,
            vllm_config.model_config.dtype,
            spec.dtype,
            str(layer.kv_cache_dtype),
        ).planes
    return dense if backend in _TOKEN_BY_TOKEN else None
