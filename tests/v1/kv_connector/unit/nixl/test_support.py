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
    groups: int = 1,
    mamba: bool = False,
    speculation: object = None,
    layer_groups: int = 1,
) -> None:
    config: Any = SimpleNamespace(
        parallel_config=ParallelConfig(),
        num_prefill_lookahead_tokens=lookahead,
        speculative_config=speculation,
    )
    for option, value in (parallel or {}).items():
        assert hasattr(config.parallel_config, option)
        setattr(config.parallel_config, option, value)
    cache: Any = SimpleNamespace(
        transfer_groups=[None] * groups, has_mamba_layers=mamba
    )
    settings = ConnectorConfig(push_layer_groups=layer_groups)
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


def test_several_groups_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        _check(groups=2)


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
