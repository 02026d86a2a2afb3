# SPDX-License-Identifier: Apache-2.0
"""The classes that the engine instantiates; they forward to the two roles.

This module alone knows the shape of the engine's connector interface. It is also
imported by the API server, so importing it loads no NIXL and starts nothing.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .commands import NixlConnectorMetadata, NixlHandshakeMetadata
from .config import ConnectorConfig
from .host_buffer import CopyOperation
from .ids import EngineId, Mode
from .prom import NixlPromMetrics
from .scheduler.role import NixlScheduler
from .stats import NixlKVConnectorStats
from .support import check_supported
from .worker.role import NixlWorker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_R = TypeVar("_R")


def _contained(
    fallback: Callable[[], Any],
) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Keep a defect in a hook from ending the engine, which does not catch it."""

    def wrap(hook: Callable[..., _R]) -> Callable[..., _R]:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> _R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("%s failed; the request is not handed off", hook)
                result: _R = fallback()
                return result

        return guarded

    return wrap


class NixlBaseConnector(KVConnectorBase_V1, SupportsHMA):
    """What push and pull have in common, which is all but the mode."""

    mode: ClassVar[Mode]
    worker_class: ClassVar[type[NixlWorker]] = NixlWorker

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config, config)
        engine_id = EngineId(transfer_config.engine_id)
        self._scheduler_role: NixlScheduler | None = None
        self._worker_role: NixlWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_role = NixlScheduler(
                vllm_config, engine_id, config, self.mode
            )
        else:
            self._worker_role = self.worker_class(
                vllm_config, kv_cache_config, engine_id, config, self.mode
            )

    # ---- class-level questions

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A layout in which a block of a layer, or of all, is one piece of memory."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if ConnectorConfig.parse(extra).enable_cross_layers_blocks:
            return "BLHNC"
        model_config = vllm_config.model_config
        if model_config is None or model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers are handed over in groups, from within a forward pass."""
        config = ConnectorConfig.parse(extra_config)
        return cls.mode is Mode.PUSH and config.push_layer_groups > 1

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their serialised form."""
        return NixlKVConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The Prometheus metrics."""
        return NixlPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # ---- scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """The cache manager, in whose pool blocks are pinned."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the side channel with the workers' descriptions."""
        self._scheduler.serve(
            {
                place: described
                for place, described in metadata.items()
                if isinstance(described, NixlHandshakeMetadata)
            }
        )

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The same, by tensor-parallel rank, for engines without a pipeline."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): described for rank, described in metadata.items()}
        )

    @_contained(lambda: None)
    def on_new_request(self, request: "Request") -> None:
        """A request has arrived."""
        self._scheduler.on_new_request(request)

    @_contained(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens another engine will provide."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Every transferred group: zeroing its blocks would race the transfer."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    @_contained(lambda: None)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Blocks were allocated for a request."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @_contained(NixlConnectorMetadata)
    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        """This step's orders to the workers."""
        return self._scheduler.build_metadata(scheduler_output)

    @_contained(lambda: None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """The workers' reports of a step."""
        self._scheduler.update(connector_output)

    @_contained(lambda: (False, None))
    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The form without groups of :meth:`request_finished_all_groups`."""
        return False, self._scheduler.request_finished(request, (block_ids,))

    @_contained(lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its memory is held by pins, never by its id."""
        return False, self._scheduler.request_finished(request, block_ids)

    @_contained(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Whether a step brings blocks that are kept for later turns."""
        return self._scheduler.yield_blocks()

    @_contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """Let go of the KV that is kept for later turns."""
        return self._scheduler.reset_cache()

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests should step on for a moment."""
        return self._scheduler_role is not None and self._scheduler_role.wants_steps()

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the caches and start the transfer thread."""
        self._worker.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyOperation) -> None:
        """The engine's copies between a device and the host."""
        self._worker.use_copy_operation(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's description."""
        return self._worker.handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's orders; those that need no forward pass start here."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, NixlConnectorMetadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: loads have started when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when all its KV is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        """A layer is computed, which matters if layers are handed over in groups."""
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Hand over what this step has computed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlConnectorMetadata)
        self._worker.end_forward(metadata)

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        """Failed loads; what succeeds is completed on the scheduler side."""
        return self._worker.transfer_results()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """The older form of :meth:`get_transfer_results`."""
        return None, self._worker.transfer_results().finished_recving or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's facts since the last step."""
        return self._worker.worker_metadata()

    # ---- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Transfer statistics since the last call."""
        role = self._worker_role or self._scheduler_role
        return None if role is None else role.stats()

    def shutdown(self) -> None:
        """Take leave of peers and close what is open."""
        if self._worker_role is not None:
            self._worker_role.shutdown()
        if self._scheduler_role is not None:
            self._scheduler_role.shutdown()

    @property
    def _scheduler(self) -> NixlScheduler:
        assert self._scheduler_role is not None, "a scheduler hook in a worker"
        return self._scheduler_role

    @property
    def _worker(self) -> NixlWorker:
        assert self._worker_role is not None, "a worker hook in the scheduler"
        return self._worker_role


class NixlPullConnector(NixlBaseConnector):
    """The decode engine READs the KV of a finished prefill."""

    mode = Mode.PULL


class NixlPushConnector(NixlBaseConnector):
    """The prefill engine WRITEs KV into blocks that the decode engine registered."""

    mode = Mode.PUSH


NixlConnector = NixlPullConnector
