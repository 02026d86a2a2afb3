# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine starts, and why."""

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from .config import ConfigError, ConnectorConfig


def check_supported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> None:
    """Refuse configurations that would fail, or be wrong, at the first request.

    Raises:
        ConfigError: naming the option, its value and what is supported.
    """
    parallel = vllm_config.parallel_config
    for option, value in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if value != 1:
            raise ConfigError(f"{option} is {value}; the NIXL connectors support 1")
    groups = len(kv_cache_config.transfer_groups)
    if groups != 1:
        raise ConfigError(
            f"the model has {groups} KV cache groups to transfer; the NIXL connectors "
            "support one (start with --disable-hybrid-kv-cache-manager)"
        )
    if kv_cache_config.has_mamba_layers:
        raise ConfigError(
            "the model has state-space layers; the NIXL connectors support attention "
            "layers"
        )
    lookahead = vllm_config.num_prefill_lookahead_tokens
    if lookahead > 1:
        raise ConfigError(
            f"the speculative method needs {lookahead} prefill lookahead tokens; the "
            "NIXL connectors support at most 1"
        )
    groups_wanted = config.push_layer_groups
    if groups_wanted > 1 and (
        parallel.use_ubatching or vllm_config.speculative_config is not None
    ):
        raise ConfigError(
            f"push_layer_groups is {groups_wanted}, but with micro-batches or "
            "speculation a layer is not done after its first call; use 1"
        )
