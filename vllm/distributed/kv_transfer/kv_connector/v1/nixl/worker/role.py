# SPDX-License-Identifier: Apache-2.0
"""The worker role: registers the cache, feeds the transfer thread, drains it.

Everything here runs on the forward thread and returns at once, except
:meth:`NixlWorker.register_kv_caches`, which sets the transfer thread up.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from .. import stats as names
from ..agent import Agent
from ..auth import Token
from ..commands import (
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
)
from ..config import ConnectorConfig
from ..handoff.actions import Offer
from ..host_buffer import CopyOperation, HostBuffer
from ..ids import EngineId, Mode, new_agent_name
from ..inline_transfer import Transfers, start_transfers
from ..layout import CacheLayout, LayerShape, describe
from ..memory import HOST, KvMemory, device_of, kv_memory
from ..orders import Facts, PendingOffer
from ..process import this_process
from ..staged_loop import StagedLoop
from ..stats import NixlKVConnectorStats
from ..transfer_loop import TransferLoop
from ..transport_facts import transport_facts
from ..wire.codec import PROTOCOL_VERSION, encode
from ..wire.ranks import RankInfo
from .facts import compat_facts, layout_facts
from .fence import compute_fence, copy_stream
from .idling import Idling
from .layer_parts import LayerParts
from .shapes import layer_shapes

logger = init_logger(__name__)

SHUTDOWN_RESERVE_SECONDS = 2.5
"""Of the time that a worker is given to end: for all but waiting for peers."""

_CLOSED_TEXT = "register_kv_caches has not been called, or shutdown has"


class NixlWorker:
    """One worker rank's side of the connector.

    ``agent_class`` is where a test puts a transport that misbehaves.
    """

    agent_class: ClassVar[type[Agent]] = Agent

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        engine_id: EngineId,
        config: ConnectorConfig,
        mode: Mode,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_id = engine_id
        self._config = config
        self._mode = mode
        self._tp_rank: int = get_tensor_model_parallel_rank()
        self._pp_rank: int = get_pp_group().rank_in_group
        self._thread: Transfers | None = None
        self._device = torch.device(HOST)
        self._memory = KvMemory("DRAM")
        self._buffer: HostBuffer | None = None
        self._layer_parts: LayerParts | None = None
        self._offers: tuple[Offer, ...] = ()
        self._info: RankInfo | None = None
        self._failed: frozenset[str] = frozenset()
        self._reply = False
        self._idling = Idling(time.monotonic())

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the caches with NIXL and start the transfer thread.

        Raises:
            LayoutError: the caches cannot be transferred as they lie.
            AgentError: NIXL or one of its backends is not available.
            ConfigError: the platform does not support ``kv_buffer_device``.
        """
        self._device = device_of(kv_caches)
        self._memory = kv_memory(
            current_platform,
            self._device,
            self._vllm_config.kv_transfer_config.kv_buffer_device,
        )
        num_blocks = self._kv_cache_config.num_blocks
        shapes = layer_shapes(self._vllm_config, self._kv_cache_config)
        layout = describe(kv_caches, num_blocks, shapes)
        if self._memory.staged:
            caches = {name: kv_caches[name] for name in shapes if name in kv_caches}
            layout = self._stage(caches, shapes)
        if self._mode is Mode.PUSH and self._config.push_layer_groups > 1:
            groups = self._config.push_layer_groups
            self._layer_parts = LayerParts(layout.regions, groups)
        self._thread = start_transfers(
            self._config.transfer_thread,
            lambda publish: self._make_loop(layout, publish),
        )
        logger.info(
            "NIXL %s connector of engine %s: %d regions of %d blocks, %d bytes per "
            "block, backends %s%s",
            self._mode.value,
            self._engine_id,
            len(layout.regions),
            self._kv_cache_config.num_blocks,
            layout.block_bytes,
            ", ".join(self._config.backends),
            ", staged on the host" if self._memory.staged else "",
        )

    def handshake_metadata(self) -> NixlHandshakeMetadata:
        """This rank's description, for the side channel."""
        assert self._info is not None, _CLOSED_TEXT
        return NixlHandshakeMetadata(encode(self._info))

    def use_copy_operation(self, operation: CopyOperation) -> None:
        """The engine's operation for copies between a device and the host."""
        if self._buffer is not None:
            self._buffer.use(operation)

    def begin_step(self, metadata: NixlConnectorMetadata) -> None:
        """Start what does not depend on this step's forward pass."""
        self._failed = metadata.report_failed
        self._reply = metadata.reply
        self._idling.begin(
            metadata.computes or metadata.reply or bool(metadata.report_failed),
            metadata.commands,
            time.monotonic(),
        )
        self._offers = metadata.offers
        if self._offers and self._layer_parts is not None:
            self._layer_parts.begin()
        if self._thread is not None:
            self._thread.computing(metadata.computes)
            if metadata.commands:
                self._thread.submit(metadata.commands)

    def layer_computed(self, layer: str) -> None:
        """Hand over what this step has computed of a group of layers."""
        if self._offers and self._layer_parts is not None:
            for part in self._layer_parts.done(layer):
                self._hand_over(part, self._layer_parts.parts)

    def end_forward(self, metadata: NixlConnectorMetadata) -> None:
        """Hand over the KV that this step's forward pass has computed."""
        if not metadata.offers:
            return
        if self._layer_parts is None:
            self._hand_over(0, 1)
        else:
            for part in self._layer_parts.rest():
                self._hand_over(part, self._layer_parts.parts)
        self._offers = ()

    def transfer_results(self) -> KVConnectorTransferResults:
        """Failed loads that the scheduler side has ordered to be reported."""
        failed, self._failed = set(self._failed), frozenset()
        return KVConnectorTransferResults(
            finished_recving=failed, failed_recving=set(failed)
        )

    def worker_metadata(self) -> NixlWorkerMetadata | None:
        """The facts since the last step, if there are any or an answer is due.

        A step that computes nothing waits for them, for some milliseconds at most.
        """
        facts = None
        if self._thread is not None:
            self._thread.computing(False)
            facts = self._thread.drain(self._idling.wait(time.monotonic()))
        reply, self._reply = self._reply, False
        if facts is not None:
            if facts.events:
                self._idling.heard(time.monotonic())
            return NixlWorkerMetadata(
                [RankReport(self._rank, facts.events, facts.tables)]
            )
        return NixlWorkerMetadata() if reply else None

    def stats(self) -> NixlKVConnectorStats | None:
        """Transfer statistics since the last call."""
        if self._thread is None:
            return None
        stats = self._thread.loop.stats
        stats.more(names.STALLED_SECONDS, self._thread.new_stall())
        return stats.take()

    def shutdown(self) -> None:
        """Take leave of the peers and end the transfer thread.

        The engine ends a worker that takes longer than it allows.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            allowed = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
            thread.close(max(0.0, allowed - SHUTDOWN_RESERVE_SECONDS))

    def _hand_over(self, part: int, parts: int) -> None:
        if self._thread is None:
            return
        fence, now = compute_fence(self._device), time.monotonic()
        self._thread.submit(
            [
                PendingOffer(replace(offer, part=part, parts=parts), fence, now)
                for offer in self._offers
            ],
            # Those that pull hear of it by way of the router.
            at_once=self._mode is Mode.PUSH,
        )

    @property
    def _rank(self) -> int:
        tp_size: int = self._vllm_config.parallel_config.tensor_parallel_size
        return self._pp_rank * tp_size + self._tp_rank

    def _make_loop(
        self, layout: CacheLayout, publish: Callable[[Facts], None]
    ) -> TransferLoop:
        on_host = self._device.type == HOST
        threads = self._config.num_threads
        agent = self.agent_class(
            new_agent_name(self._engine_id, self._rank),
            self._config.backends,
            num_threads=(0 if on_host else 4) if threads is None else threads,
            progress_thread=not on_host,
        )
        agent.register(layout.ranges, self._memory.mem_type)
        self._info = self._describe(agent, layout)
        token = Token.load(self._config.side_channel_token_file)
        common = (
            self._config,
            agent,
            self._info,
            self._mode,
            token,
            publish,
            time.monotonic,
        )
        if self._buffer is None:
            return TransferLoop(*common)
        # Each thread has a current device, in which its copies are launched.
        current_platform.set_device(self._device)
        return StagedLoop(*common, self._buffer)

    def _stage(
        self, caches: Mapping[str, torch.Tensor], shapes: Mapping[str, LayerShape]
    ) -> CacheLayout:
        """The layout of a copy of the caches on the host."""
        device, stream = self._device, copy_stream(self._device)
        self._buffer = HostBuffer(caches, lambda: compute_fence(device), lambda: stream)
        blocks = self._kv_cache_config.num_blocks
        layout = describe(self._buffer.host, blocks, shapes)
        self._buffer.bind(layout.regions)
        return layout

    def _describe(self, agent: Agent, layout: CacheLayout) -> RankInfo:
        parallel = self._vllm_config.parallel_config
        return RankInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            agent_name=agent.name,
            tp_rank=self._tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_rank=self._pp_rank,
            pp_size=parallel.pipeline_parallel_size,
            block_size=self._vllm_config.cache_config.block_size,
            mem_type=self._memory.mem_type,
            agent_metadata=agent.metadata(),
            regions=layout.regions,
            compat=compat_facts(self._vllm_config),
            layout=layout_facts(self._vllm_config, self._kv_cache_config, self._mode),
            process=this_process(),
            transport=transport_facts(self._config.backends),
        )
