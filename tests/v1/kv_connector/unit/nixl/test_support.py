# SPDX-License-Identifier: Apache-2.0
"""What is refused when an engine starts."""

from typing import get_args

import pytest
import torch

from v1.kv_connector.unit.nixl.refusals import (
    HostOnly,
    InTree,
    OutOfTree,
    Silent,
    memory_of,
    start,
)
from vllm.config.kv_transfer import KVRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.memory import (
    KvMemory,
    is_staged,
    kv_memory,
)
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform


def test_one_rank_and_one_group_are_supported() -> None:
    start()
    start(lookahead=1)


@pytest.mark.parametrize("role", get_args(KVRole))
def test_tensor_parallelism_is_supported_in_every_role(role: KVRole) -> None:
    start({"tensor_parallel_size": 8}, role=role)


def test_a_pipeline_is_supported_where_prompts_are_computed_for_others() -> None:
    pipeline = {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}
    start(pipeline, role="kv_producer", batches=4)
    start(pipeline, role="kv_both", bidirectional=True, batches=4)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 4 .*kv_consumer"):
        start(pipeline, role="kv_consumer", batches=4)


def test_reading_back_under_steps_in_flight_needs_the_role_of_a_consumer() -> None:
    start(role="kv_producer", bidirectional=True)
    start(role="kv_producer", batches=2)
    with pytest.raises(ConfigError, match="must be kv_both"):
        start(role="kv_producer", bidirectional=True, batches=2)


@pytest.mark.parametrize(
    "option",
    [
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_context_parallelism_is_named(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 2"):
        start({option: 2})


def test_several_groups_have_equal_blocks() -> None:
    start(groups=(16, 16))
    start(groups=(16, 16), bidirectional=True)
    remedy = "--disable-hybrid-kv-cache-manager"
    with pytest.raises(ConfigError, match=rf"\[16, 32\] tokens.*{remedy}"):
        start(groups=(16, 32))


def test_a_backend_that_cannot_continue_a_prompt_is_refused() -> None:
    start(mla=True)
    start(continues=False)
    with pytest.raises(ConfigError, match="MLA"):
        start(mla=True, continues=False)


def test_a_group_that_stays_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 of the model's 2"):
        start(groups=(16, 16), kept_back=1)


def test_state_space_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="state-space"):
        start(mamba=True)


def test_a_long_lookahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 prefill lookahead"):
        start(lookahead=2)


def test_groups_of_layers_need_layers_that_are_done_after_one_call() -> None:
    start(layer_groups=4)
    start({"ubatch_size": 2}, speculation=object())
    for parallel, speculation in (({"ubatch_size": 2}, None), ({}, object())):
        with pytest.raises(ConfigError, match="push_layer_groups is 4"):
            start(parallel, speculation=speculation, layer_groups=4)


@pytest.mark.parametrize(
    ("platform", "buffer", "expected"),
    [
        # The base's platforms say nothing; a cache that is not the host's is VRAM.
        (InTree, "cuda", KvMemory("VRAM")),
        (InTree, "cpu", KvMemory("DRAM", staged=True)),
        (Silent, "npu", KvMemory("VRAM")),
        # What the platform says of itself counts, whatever it is called.
        (OutOfTree, "npu", KvMemory("VRAM")),
        (HostOnly, "cpu", KvMemory("DRAM", staged=True)),
    ],
)
def test_kinds_of_memory(
    platform: type[Platform], buffer: str, expected: KvMemory
) -> None:
    assert memory_of(platform, buffer) == expected
    assert is_staged(platform(), buffer) == expected.staged


@pytest.mark.parametrize("platform", [CpuPlatform, InTree, OutOfTree])
@pytest.mark.parametrize("buffer", ["cpu", "cuda"])
def test_caches_on_the_host_are_registered_where_they_are(
    platform: type[Platform], buffer: str
) -> None:
    found = kv_memory(platform(), torch.device("cpu"), buffer)
    assert found == KvMemory(platform.get_nixl_memory_type() or "DRAM")


def test_a_platform_names_its_memory_and_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OutOfTree, "memory", "OBJ")
    assert memory_of(OutOfTree, "npu").mem_type == "OBJ"
    with pytest.raises(ConfigError, match=r"'cpu' on a 'npu' .* supports npu"):
        memory_of(OutOfTree, "cpu")
    monkeypatch.setattr(OutOfTree, "buffers", ("npu", "cpu"))
    assert memory_of(OutOfTree, "cpu") == KvMemory("DRAM", staged=True)


def test_a_buffer_that_a_silent_platform_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'xpu' on a 'cuda' .* supports cuda, cpu"):
        memory_of(InTree, "xpu")
    with pytest.raises(ConfigError, match=r"'cpu' on a 'npu' .* supports npu"):
        memory_of(Silent, "cpu")
