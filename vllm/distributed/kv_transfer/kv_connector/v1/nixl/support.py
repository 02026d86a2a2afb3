# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine starts, and why."""

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from .config import ConfigError, ConnectorConfig

_NO_GROUPS = "start with --disable-hybrid-kv-cache-manager"


def check_supported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> None:
    """Refuse configurations that would fail, or be wrong, at the first request.

    Raises:
        ConfigError: naming the option, its value and what is supported.
    """
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    for option, value in (
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if value != 1:
            raise ConfigError(
                f"{option} is {value}, but the NIXL connectors move whole tokens, not "
                "parts of a context that is divided over ranks; use 1"
            )
    stages = parallel.pipeline_parallel_size
    if stages > 1 and not transfer.is_kv_producer:
        raise ConfigError(
            f"pipeline_parallel_size is {stages} with kv_role {transfer.kv_role!r}, "
            "but only prefill engines may have a pipeline; use kv_producer (or kv_both "
            "for an engine that also reads earlier turns back), or 1"
        )
    if (
        config.bidirectional_kv_xfer
        and not transfer.is_kv_consumer
        and vllm_config.max_concurrent_batches > 1
    ):
        # The engine keeps a freed block from being filled by a load while a step in
        # flight may still write it, but only in the role of a consumer.
        raise ConfigError(
            f"kv_role is {transfer.kv_role!r} with bidirectional_kv_xfer, but an "
            "engine that reads KV back while several steps are in flight must be "
            "kv_both"
        )
    if kv_cache_config.has_mamba_layers:
        raise ConfigError(
            "the model has state-space layers; the NIXL connectors support attention "
            "layers"
        )
    if (
        vllm_config.model_config is not None
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigError(
            "the model caches latents (MLA), and chunked prefill and prefix caching "
            "are off, as the engine sets them where its MLA backend cannot continue a "
            "prompt that is partly computed (on CPUs without AMX); a decode engine "
            "continues each of them. Turn one of both on if the backend can"
        )
    _check_groups(vllm_config, kv_cache_config)
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


def _check_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Several groups go with equal blocks, and all of them."""
    groups, remedy = kv_cache_config.kv_cache_groups, _NO_GROUPS
    kept_back = len(groups) - len(kv_cache_config.transfer_groups)
    if kept_back:
        raise ConfigError(
            f"{kept_back} of the model's {len(groups)} KV cache groups are not to be "
            "transferred; the NIXL connectors support models all of whose groups are"
        )
    if len(groups) == 1:
        return
    block_size = vllm_config.cache_config.block_size
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if sizes != [block_size]:
        raise ConfigError(
            f"the model's {len(groups)} KV cache groups have blocks of {sizes} tokens "
            f"(block_size is {block_size}); the NIXL connectors support several groups "
            f"of equal block sizes ({remedy})"
        )
