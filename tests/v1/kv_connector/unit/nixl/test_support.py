# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ParallelConfig
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
) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=continues),
        model_config=SimpleNamespace(use_mla=mla),
        parallel_config=ParallelConfig(),
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


@pytest.mark.parametrize(
    "option",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_other_parallelism_is_named(option: str) -> None:
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
