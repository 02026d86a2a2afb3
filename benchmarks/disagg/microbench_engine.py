# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's scheduler and the connector's two roles.

The forward pass is a wait, or a loop in pure Python that holds the interpreter.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from microbench_connector import COST, SCHEDULER_HOOKS, STAMPS
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Received,
    ReceiveFailed,
)
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LAYERS = 64
KV_HEADS = 8
HEAD_DIM = 128
ELEMENT_BYTES = 2
MAX_TOKENS = 1 << 15
TOKEN = 7
"""What every step samples."""

SLICE_SECONDS = 0.0005
"""Length of a forward pass that has nothing to compute."""


@dataclass(frozen=True)
class Shape:
    """One rank's share of Qwen3-32B's KV cache.

    Attributes:
        split: whether K and V of a layer lie apart, as two regions.
    """

    tp: int = 8
    block_size: int = 16
    split: bool = False

    @property
    def kv_heads(self) -> int:
        """KV heads per rank."""
        return KV_HEADS // self.tp

    @property
    def regions(self) -> int:
        """Regions that the cache consists of."""
        return LAYERS * (2 if self.split else 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one region."""
        both = 2 * self.block_size * self.kv_heads * HEAD_DIM * ELEMENT_BYTES
        return both // 2 if self.split else both

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions."""
        return self.page_bytes * self.regions

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True)
class Setting:
    """How one engine is set up.

    Attributes:
        folder: where the model is described; the same on both engines.
        chunk: tokens that one step computes at most.
        cache_bytes: memory of the KV cache, all of which is touched.
        extra: further keys of ``kv_connector_extra_config``.
    """

    folder: str
    shape: Shape = Shape()
    mode: str = "push"
    num_threads: int = 0
    chunk: int = MAX_TOKENS
    cache_bytes: int = 640 << 20
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """CPU nanoseconds of the forward thread in one step's hooks.

    ``transfers`` and ``orders`` tell what then was before the transfer thread.
    """

    scheduler: int
    worker: int
    hooks: dict[str, int]
    transfers: int


@dataclass
class Seen:
    """What an engine saw of one hand-off; times in nanoseconds, 0: not yet.

    Attributes:
        attempt: D: the ``registration_id``.
        handed: P: when each step's KV was computed.
        registered: D: when the registration had been sent.
        heard: D: when the last notification was taken.
        started: D: when the step began that ran the request.
        bytes: D: what was moved.
        descriptors: D: how many descriptors NIXL was given.
    """

    attempt: str = ""
    handed: list[int] = field(default_factory=list)
    registered: int = 0
    heard: int = 0
    started: int = 0
    bytes: int = 0
    descriptors: int = 0


class BenchmarkError(RuntimeError):
    """What was to be measured did not happen."""


def spin(seconds: float) -> int:
    """Compute in pure Python, never releasing the interpreter. Returns rounds."""
    end = time.perf_counter() + seconds
    rounds = 0
    value = 1
    while time.perf_counter() < end:
        for _ in range(50):
            value = value * 1103515245 + 12345 & 0x7FFFFFFF
        rounds += 1
    return rounds


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Arena:
    """Touched memory that caches of different shapes lie in, one after another."""

    def __init__(self, size: int) -> None:
        self.memory = torch.ones(size, dtype=torch.uint8)

    def caches(self, shape: Shape, num_blocks: int) -> dict[str, torch.Tensor]:
        """Views of the regions."""
        size = num_blocks * shape.page_bytes
        return {
            f"region{index}": self.memory[index * size : (index + 1) * size].view(
                num_blocks, shape.page_bytes
            )
            for index in range(shape.regions)
        }


def set_up_process() -> None:
    """What a worker process has before it makes a connector: its one rank."""
    init_none_hash(sha256)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
            local_rank=0,
            backend="gloo",
        )
        initialize_model_parallel(1, 1)


class Engine:
    """One engine with one rank.

    Args:
        name: its engine id.
        setting: how it is set up.
        arena: where its cache lies.
    """

    def __init__(self, name: str, setting: Setting, arena: Arena) -> None:
        self.setting = setting
        self.shape = setting.shape
        num_blocks = min(setting.cache_bytes, len(arena.memory)) // (
            self.shape.block_bytes
        )
        self._num_blocks = num_blocks
        self.port = free_port()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        self._config = _vllm_config(name, setting, num_blocks)
        self._cache_config = self._describe_cache(num_blocks)
        self.scheduler = Scheduler(
            self._config,
            self._cache_config,
            StructuredOutputManager(self._config),
            self.shape.block_size,
        )
        self.worker = KVConnectorFactory.create_connector(
            self._config, KVConnectorRole.WORKER, self._cache_config
        )
        self.arena_bytes = arena.memory.numpy()
        STAMPS.page_bytes = self.shape.page_bytes
        self.caches = arena.caches(self.shape, num_blocks)
        with set_current_vllm_config(self._config):
            self.worker.register_kv_caches(self.caches)
        connector = self.scheduler.connector
        assert connector is not None
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        self.connector = connector
        self.steps: list[Step] = []
        self.tables: dict[str, int] = {}
        self.seen: dict[str, Seen] = {}
        self._attempts: dict[str, str] = {}
        self._hasher = get_request_block_hasher(self.shape.block_size, sha256)

    def add(self, name: str, seed: int, tokens: int, params: dict[str, Any]) -> None:
        """A request with a prompt that ``seed`` determines and an answer of one."""
        start = seed * 7919
        request = Request(
            name,
            [(start + index) % 150000 + 1 for index in range(tokens)],
            SamplingParams(
                max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params}
            ),
            None,
            block_hasher=self._hasher,
        )
        self.seen[name] = Seen()
        self.scheduler.add_request(request)

    def arrange(self, fragmented: bool) -> None:
        """Bring the free blocks into a random order, or into that of their memory.

        Raises:
            BenchmarkError: some blocks are not free.
        """
        pool = self.scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() != self._num_blocks - 1:
            raise BenchmarkError(f"blocks are in use: {self.tables}")
        blocks = pool.get_new_blocks(self._num_blocks - 1)
        blocks.sort(key=lambda block: block.block_id)
        if fragmented:
            order = np.random.default_rng(self.port).permutation(len(blocks))
            blocks = [blocks[index] for index in order]
        pool.free_blocks(blocks)

    def step(self, compute: Callable[[int], None]) -> None:
        """One engine step, ``compute`` being its forward pass over so many tokens."""
        begun = time.monotonic_ns()
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        compute(output.total_num_scheduled_tokens)
        handed = time.monotonic_ns()
        self.worker.wait_for_save()
        for name in output.num_scheduled_tokens:
            self.seen[name].handed.append(handed)
            self.seen[name].started = self.seen[name].started or begun
        for command in metadata.commands:
            if isinstance(command, Receive):
                attempt = command.request.registration_id
                self._attempts[attempt] = command.request.transfer_id
        results = self.worker.get_transfer_results(output.finished_req_ids)
        told = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        for report in () if told is None else told.reports:
            self.tables = report.tables
            for event in report.events:
                self._take(event)
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                [self._sampled(name) for name in names],
                kv_connector_output=KVConnectorOutput(
                    finished_recving=results.finished_recving,
                    failed_recving=results.failed_recving,
                    kv_connector_worker_meta=told,
                ),
            ),
        )
        hooks = COST.take()
        scheduler = sum(hooks.get(name, 0) for name in SCHEDULER_HOOKS)
        worker = sum(hooks.values()) - scheduler
        self.steps.append(
            Step(scheduler, worker, hooks, self.tables.get("transfers", 0))
        )

    @property
    def wants_steps(self) -> bool:
        """Whether the engine has a reason to step."""
        return bool(self.scheduler.has_requests()) or bool(
            self.connector.has_pending_push_work()
        )

    def close(self) -> None:
        """End it."""
        self.worker.shutdown()
        self.connector.shutdown()

    def _take(self, event: object) -> None:
        if isinstance(event, ReceiveFailed):
            raise BenchmarkError(f"a hand-off failed: {event.reason}")
        if isinstance(event, Received):
            attempt = event.registration_id
            seen = self.seen[self._attempts.pop(attempt)]
            seen.attempt = attempt
            seen.registered = STAMPS.registered.pop(attempt, 0)
            seen.heard = STAMPS.heard.pop(attempt, 0)
            seen.bytes = event.size.bytes
            seen.descriptors = event.size.descriptors

    def _describe_cache(self, num_blocks: int) -> KVCacheConfig:
        spec = FullAttentionSpec(
            block_size=self.shape.block_size,
            num_kv_heads=self.shape.kv_heads,
            head_size=HEAD_DIM,
            dtype=torch.bfloat16,
        )
        layers = [f"region{index}" for index in range(self.shape.regions)]
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        )

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        return [TOKEN] if request.num_computed_tokens >= request.num_tokens else []


def _vllm_config(name: str, setting: Setting, num_blocks: int) -> VllmConfig:
    cache = CacheConfig(
        block_size=setting.shape.block_size, enable_prefix_caching=False
    )
    cache.num_gpu_blocks = num_blocks
    return VllmConfig(
        model_config=ModelConfig(
            model=_model(setting),
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
            dtype="bfloat16",
            enforce_eager=True,
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=setting.chunk,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=f"Measured{setting.mode.capitalize()}Connector",
            kv_connector_module_path="microbench_connector",
            kv_role="kv_both",
            engine_id=name,
            kv_connector_extra_config={
                "num_threads": setting.num_threads,
                **setting.extra,
            },
        ),
    )


def _model(setting: Setting) -> str:
    """The folder of a model's description, without weights."""
    shape = setting.shape
    folder = Path(setting.folder) / f"tp{shape.tp}"
    folder.mkdir(exist_ok=True)
    described = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64 // shape.tp,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    # Both engines may write it at the same time.
    unfinished = folder / f"config.json.{os.getpid()}"
    unfinished.write_text(json.dumps(described))
    unfinished.replace(folder / "config.json")
    return str(folder)
