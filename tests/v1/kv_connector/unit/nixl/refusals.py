# SPDX-License-Identifier: Apache-2.0
"""What is refused, each with a configuration that is.

``docs/features/compatibility.md`` has a row for each, and is checked against them.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from v1.kv_connector.unit.nixl.simulated_memory import Layer, Side, build
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.config.kv_transfer import KVRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.compat import refusal
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    LayerShape,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.memory import (
    KvMemory,
    kv_memory,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.support import check_supported
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RankInfo
from vllm.platforms.interface import Platform, PlatformEnum

LAYERS = tuple(Layer(f"l{index}", 4, 8) for index in range(2))


def start(
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
    """Check such an engine as its start does."""
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


class Silent(Platform):  # type: ignore[misc]
    """A platform that leaves all hooks for NIXL as the base has them."""

    _enum = PlatformEnum.OOT
    device_type = "npu"


class InTree(Platform):  # type: ignore[misc]
    """One of the base's: it says nothing either, but has the copies."""

    _enum = PlatformEnum.CUDA
    device_type = "cuda"

    @classmethod
    def swap_out_blocks_to_host(cls, *_: Any) -> None: ...

    @classmethod
    def insert_blocks_to_device(cls, *_: Any) -> None: ...


class OutOfTree(Platform):  # type: ignore[misc]
    """A platform of a plugin: its device has no name in torch, and it says all."""

    _enum = PlatformEnum.OOT
    device_type = "npu"
    memory: ClassVar[str | None] = "VRAM"
    buffers: ClassVar[tuple[str, ...]] = ("npu",)

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        return {cls.device_type: cls.buffers}

    @classmethod
    def get_nixl_memory_type(cls) -> str | None:
        return cls.memory


class HostOnly(OutOfTree):
    """One of which NIXL cannot register the memory."""

    memory = None
    buffers = ("cpu",)


DEVICES = {
    Silent: torch.device("privateuseone"),
    InTree: torch.device("cuda"),
    OutOfTree: torch.device("privateuseone"),
    HostOnly: torch.device("privateuseone"),
}
"""Where the caches are."""


def memory_of(platform: type[Platform], buffer: str) -> KvMemory:
    """What is registered on such a platform."""
    return kv_memory(platform(), DEVICES[platform], buffer)


def _scattered_blocks() -> None:
    cache = torch.zeros(2, 6, 4).transpose(0, 1)
    describe({"l0": cache}, 6, {"l0": LayerShape()})


AT_START: dict[str, Callable[[], object]] = {
    "decode context parallelism": lambda: start({"decode_context_parallel_size": 2}),
    "prefill context parallelism": lambda: start({"prefill_context_parallel_size": 2}),
    "pipeline stages of a decode engine": lambda: start(
        {"pipeline_parallel_size": 2}, role="kv_consumer"
    ),
    "reading turns back as `kv_producer` with several steps in flight": lambda: start(
        role="kv_producer", bidirectional=True, batches=2
    ),
    "state-space layers": lambda: start(mamba=True),
    "MLA on CPUs without AMX": lambda: start(mla=True, continues=False),
    "cache groups of which some stay": lambda: start(groups=(16, 16), kept_back=1),
    "cache groups of unequal block sizes": lambda: start(groups=(16, 32)),
    "more than one lookahead token": lambda: start(lookahead=2),
    "`push_layer_groups` with micro-batches": lambda: start(
        {"ubatch_size": 2}, layer_groups=2
    ),
    "`push_layer_groups` with speculation": lambda: start(
        speculation=object(), layer_groups=2
    ),
    "a staging buffer on the host, on a platform without copies": lambda: memory_of(
        Silent, "cpu"
    ),
    "a `kv_buffer_device` that the platform does not support": lambda: memory_of(
        HostOnly, "npu"
    ),
    "cache layouts in which a block of a layer is not one piece": _scattered_blocks,
}
"""Each raises."""


def _rank(side: Side, layers: tuple[Layer, ...] = LAYERS, **changes: Any) -> RankInfo:
    info = build("engine", side, layers, np.random.default_rng(0))[0].info
    return msgspec.structs.replace(info, **changes)


def _whole(block: int) -> RankInfo:
    """A rank whose pages cannot be taken apart."""
    info = _rank(Side(block=block))
    regions = (msgspec.structs.replace(r, planes=()) for r in info.regions)
    return msgspec.structs.replace(info, regions=tuple(regions))


def _layouts(key: str, here: str, there: str) -> tuple[RankInfo, RankInfo]:
    return _rank(Side(), layout={key: here}), _rank(Side(), layout={key: there})


def _windows(window: int) -> RankInfo:
    return _rank(Side(), tuple(Layer(f"l{i}", 4, 8, i, window * i) for i in range(2)))


AT_HANDSHAKE: dict[str, Callable[[], tuple[RankInfo, RankInfo]]] = {
    "push with pull": lambda: _layouts("connector_mode", "push", "pull"),
    "another model dtype": lambda: _layouts("dtype", "bfloat16", "float16"),
    "another KV cache dtype": lambda: _layouts("cache_dtype", "auto", "fp8"),
    "CPU pages packed for another instruction set": lambda: _layouts(
        "cpu_attention_isa", "amx", "vec"
    ),
    "cross-layer blocks on one side only": lambda: _layouts(
        "kv_cache_layout", "BLHNC", "LBHNC"
    ),
    "unequal tensor-parallel sizes with tokens outside heads": lambda: (
        _rank(Side(tp=2, layout="LBNHC")),
        _rank(Side(layout="LBNHC")),
    ),
    "KV heads that do not divide": lambda: (
        _rank(Side()),
        _rank(Side(), tp_size=3),
    ),
    "block sizes of which none is a multiple of the other": lambda: (
        _rank(Side(block=8)),
        _rank(Side(block=12)),
    ),
    "unequal block sizes where tokens of a page cannot be told apart": lambda: (
        _whole(8),
        _whole(16),
    ),
    "other windows": lambda: (_windows(8), _windows(16)),
    "layers on one side only": lambda: (
        _rank(Side()),
        _rank(Side(), LAYERS[:1]),
    ),
    "another model, version, quantization, attention backend or speculation": lambda: (
        _rank(Side(), compat={"model": "one"}),
        _rank(Side(), compat={"model": "other"}),
    ),
}
"""Each makes two ranks that refuse each other."""


def refused(what: str) -> BaseException | str | None:
    """How a row of either table is refused: an exception, a text, or not at all."""
    if what in AT_HANDSHAKE:
        return refusal(*AT_HANDSHAKE[what](), enforce=True)
    try:
        AT_START[what]()
    except ValueError as error:
        return error
    return None
