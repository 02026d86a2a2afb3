# SPDX-License-Identifier: Apache-2.0
"""The scheduler role: both sides of hand-offs, the pins and the side channel.

All methods run on the engine thread; the side channel's thread only reads sizes.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger

from ..auth import AllowedPeers, Token
from ..commands import (
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
)
from ..config import ConnectorConfig
from ..handoff.actions import Received, ReceiveFailed, ReceiveQuiet, SenderClosed
from ..ids import EngineId, Mode, RequestId, TransferId
from ..params import (
    DecodeParams,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    parse_params,
)
from ..side_channel import SideChannelServer
from ..stats import NixlKVConnectorStats, StatsCollector
from .decode import DecodeSide
from .pins import PinBoard, PinState
from .prefill import PrefillSide
from .records import Records

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class NixlScheduler:
    """The connector's state in the scheduler process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: EngineId,
        config: ConnectorConfig,
        mode: Mode,
    ) -> None:
        parallel = vllm_config.parallel_config
        block_size = vllm_config.cache_config.block_size
        world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        suffix = not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        self._token = Token.load(config.side_channel_token_file)
        self._allowed = AllowedPeers(config.allowed_peers)
        self._engine_id = engine_id
        self._mode = mode
        self._address = PrefillAddress(
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
            engine_id=engine_id,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )
        self._pins = PinBoard()
        self._records = Records()
        self._stats = StatsCollector()
        self._prefill = PrefillSide(
            mode,
            self._address,
            block_size,
            world_size,
            suffix,
            self._pins,
            self._records,
        )
        self._decode = DecodeSide(
            mode,
            block_size,
            world_size,
            config.push_registration_timeout,
            suffix,
            self._pins,
            self._records,
            self._stats,
        )
        self._tables: dict[int, dict[str, int]] = {}
        self._server: SideChannelServer | None = None

    # ---- set-up and end

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """The pool whose blocks are pinned."""
        self._pins.bind(pool)

    def serve(self, workers: dict[tuple[int, int], NixlHandshakeMetadata]) -> None:
        """Open the side channel, now that the workers have described themselves.

        Raises:
            SideChannelFailure: its address cannot be bound.
        """
        if self._server is not None or not workers:
            return
        self._server = SideChannelServer(
            (self._address.host, self._address.port),
            [workers[place].rank_info for place in sorted(workers)],
            self,
            self._token,
        )
        logger.info(
            "Side channel of engine %s listens on %s:%d",
            self._engine_id,
            self._address.host,
            self._address.port,
        )

    def shutdown(self) -> None:
        """Close the side channel."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # ---- requests

    def on_new_request(self, request: "Request") -> None:
        """Read the request's params once; what cannot be used is logged here."""
        try:
            params = parse_params(request.kv_transfer_params)
        except ParamsError as error:
            logger.warning(
                "Request %s is served without a hand-off: %s",
                request.request_id,
                error,
            )
            self._records.count("invalid_params")
            return
        if isinstance(params, PrefillParams):
            self._prefill.new_request(request, params)
        elif isinstance(params, DecodeParams):
            if not self._allowed.allows(params.address.host):
                logger.warning(
                    "Request %s is served without a hand-off: remote_host %r is not "
                    "in allowed_peers",
                    request.request_id,
                    params.address.host,
                )
                self._records.count("peer_not_allowed")
                return
            self._decode.new_request(request, params)

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int, bool]:
        """Tokens that another engine will provide, and whether asynchronously."""
        count = self._decode.matched(RequestId(request.request_id), computed)
        return count, count > 0

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Blocks were allocated for a request."""
        self._decode.allocated(
            RequestId(request.request_id), blocks, external_tokens, time.monotonic()
        )

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """A request has ended; returns the params for its client."""
        self._decode.finished(request)
        return self._prefill.finished(request, block_ids)

    # ---- steps

    def build_metadata(self, output: "SchedulerOutput") -> NixlConnectorMetadata:
        """This step's orders to the workers."""
        now = time.monotonic()
        commands, offers = self._prefill.build(output, now)
        self._decode.warn_of_quarantine(now)
        more, failing, reply = self._decode.build()
        return NixlConnectorMetadata((*commands, *more), tuple(offers), failing, reply)

    def update(self, output: "KVConnectorOutput") -> None:
        """Take the workers' reports of a step and complete what they complete."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, NixlWorkerMetadata):
            for report in metadata.reports:
                self._take(report)
        self._decode.complete(output)

    def stats(self) -> NixlKVConnectorStats | None:
        """What the scheduler side has observed since the last call."""
        self._stats.quarantine(self._pins.counts()[PinState.QUIESCING])
        return self._stats.take()

    def wants_steps(self) -> bool:
        """Whether an engine without requests should step on for a moment."""
        now = time.monotonic()
        return self._prefill.release_due(now) or self._decode.release_due(now)

    def integrity(self) -> dict[str, object]:
        """Free blocks, pins by state, entries per table, totals."""
        free, total = self._pins.usage()
        tables = {**self._prefill.sizes(), **self._decode.sizes()}
        for rank, sizes in sorted(self._tables.copy().items()):
            tables.update({f"rank{rank}_{name}": n for name, n in sizes.items()})
        return {
            "engine_id": self._engine_id,
            "mode": self._mode.value,
            "free_blocks": free,
            "total_blocks": total,
            "pins": self._pins.counts(),
            "tables": tables,
            "counters": self._records.totals(),
        }

    def handoffs(self) -> list[dict[str, object]]:
        """The latest finished hand-offs, oldest first."""
        return self._records.latest()

    def failure(self, transfer_id: TransferId) -> dict[str, object] | None:
        """What became of one hand-off."""
        return self._records.failure(transfer_id)

    def _take(self, report: RankReport) -> None:
        self._tables[report.rank] = report.tables
        for event in report.events:
            match event:
                case SenderClosed():
                    self._prefill.closed(report.rank, event)
                case Received():
                    self._decode.received(report.rank, event)
                case ReceiveFailed():
                    self._decode.failed(report.rank, event)
                case ReceiveQuiet():
                    self._decode.quiet(report.rank, event)
