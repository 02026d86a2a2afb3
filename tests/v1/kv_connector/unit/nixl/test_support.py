# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine starts."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from vllm.config import KVTransferConfig, ParallelConfig
from vllm.config.kv_transfer import KVRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import (
    ConfigError,
    ConnectorConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.support import check_supported


def _check(
    parallel: dict[str, int] | None = None,
    *,
    lookahead: int = 0,
    groups: tuple[int, ...] = (16,),
    kept_back: int = 0,
    bidirectional: bool = False,
    mla: bool = False,
    continues: bool = True,
    mamba: bool = False,
    speculation: object = None,
    layer_groups: int = 1,
    role: KVRole = "kv_both",
    batches: int = 1,
) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=continues),
        model_config=SimpleNamespace(use_mla=mla),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role=role),
        max_concurrent_batches=batches,
        num_prefill_lookahead_tokens=lookahead,
        speculative_config=speculation,
    )
    for option, value in (parallel or {}).items():
        assert hasattr(config.parallel_config, option)
        setattr(config.parallel_config, option, value)
    made = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size))
        for size in groups
    ]
    cache: Any = SimpleNamespace(
        kv_cache_groups=made,
        transfer_groups=made[kept_back:],
        has_mamba_layers=mamba,
    )
    settings = ConnectorConfig(
        push_layer_groups=layer_groups, bidirectional_kv_xfer=bidirectional
    )
    check_supported(config, cache, settings)


def test_one_rank_and_one_group_are_supported() -> None:
    _check()
    _check(lookahead=1)


@pytest.mark.parametrize("role", get_args(KVRole))
def test_tensor_parallelism_is_supported_in_every_role(role: KVRole) -> None:
    _check({"tensor_parallel_size": 8}, role=role)


def test_a_pipeline_is_supported_where_prompts_are_computed_for_others() -> None:
    pipeline = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    _check(pipeline, role="kv_producer", batches=4)
    _check(pipeline, role="kv_both", bidirectional=True, batches=4)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 4 .*kv_consumer"):
        _check(pipeline, role="kv_consumer", batches=4)


def test_reading_back_under_steps_in_flight_needs_the_role_of_a_consumer() -> None:
    _check(role="kv_producer", bidirectional=True)
    _check(role="kv_producer", batches=2)
    with pytest.raises(ConfigError, match="must be kv_both"):
        _check(role="kv_producer", bidirectional=True, batches=2)


@pytest.mark.parametrize(
    "option",
    [
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_context_parallelism_is_named(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 2"):
        _check({option: 2})


def test_several_groups_have_equal_blocks_and_one_direction() -> None:
    _check(groups=(16, 16))
    _check(bidirectional=True)
    remedy = "--disable-hybrid-kv-cache-manager"
    with pytest.raises(ConfigError, match=rf"\[16, 32\] tokens.*{remedy}"):
        _check(groups=(16, 32))
    with pytest.raises(ConfigError, match=f"bidirectional_kv_xfer.*{remedy}"):
        _check(groups=(16, 16), bidirectional=True)


def test_a_backend_that_cannot_continue_a_prompt_is_refused() -> None:
    _check(mla=True)
    _check(continues=False)
    with pytest.raises(ConfigError, match="MLA"):
        _check(mla=True, continues=False)


def test_a_group_that_stays_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 of the model's 2"):
        _check(groups=(16, 16), kept_back=1)


def test_state_space_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="state-space"):
        _check(mamba=True)


def test_a_long_lookahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 prefill lookahead"):
        _check(lookahead=2)


def test_groups_of_layers_need_layers_that_are_done_after_one_call() -> None:
    _check(layer_groups=4)
    _check({"ubatch_size": 2}, speculation=object())
    for parallel, speculation in (({"ubatch_size": 2}, None), ({}, object())):
        with pytest.raises(ConfigError, match="push_layer_groups is 4"):
            _check(parallel, speculation=speculation, layer_groups=4)
