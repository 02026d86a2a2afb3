# SPDX-License-Identifier: Apache-2.0
"""What must be equal on two engines before they may exchange KV."""

from typing import Any

from vllm import __version__
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from ..ids import Mode


def compat_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Facts whose difference ``enforce_handshake_compat`` decides about."""
    model = vllm_config.model_config
    backends = sorted(
        backend.get_name() for backend in get_current_attn_backends(vllm_config)
    )
    return {
        "vllm_version": __version__.partition("+")[0],
        "model": str(model.model),
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "attn_backend": ",".join(backends),
        "speculative_config": _speculation(vllm_config.speculative_config),
    }


def layout_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, mode: Mode
) -> dict[str, str]:
    """Facts without which bytes would be misread; never negotiable."""
    model = vllm_config.model_config
    facts = {
        "connector_mode": mode.value,
        "dtype": str(model.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "num_kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "num_layers": str(model.get_total_num_hidden_layers()),
        "kv_cache_groups": ",".join(map(_group, kv_cache_config.transfer_groups)),
    }
    if isa := _cpu_isa(vllm_config):
        # The CPU backend packs a page for the instruction set that it picked.
        facts["cpu_attention_isa"] = isa
    return facts


def _group(group: KVCacheGroupSpec) -> str:
    """What of a prompt a group keeps."""
    spec = group.kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        return f"window of {spec.sliding_window}"
    return type(spec).__name__


def _cpu_isa(vllm_config: VllmConfig) -> str:
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    found = {str(layer.isa) for layer in context.values() if hasattr(layer, "isa")}
    return ",".join(sorted(found))


def _speculation(config: Any) -> str:
    if config is None:
        return "none"
    draft = getattr(config, "draft_model_config", None)
    return f"{config.method}:{getattr(draft, 'model', None)}"
