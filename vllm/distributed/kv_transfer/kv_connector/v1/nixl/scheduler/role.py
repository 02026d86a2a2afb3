# SPDX-License-Identifier: Apache-2.0
"""The scheduler role: both sides of hand-offs, the pins and the side channel.

All methods run on the engine thread; the side channel's thread only reads sizes.
"""

import time
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from .. import stats as names
from ..auth import AllowedPeers, Token
from ..commands import (
    Command,
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
)
from ..config import ConnectorConfig
from ..handoff.actions import (
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Retracted,
    SenderClosed,
)
from ..ids import EngineId, Mode, RequestId, TransferId
from ..memory import is_staged
from ..params import (
    DecodeParams,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    parse_params,
)
from ..side_channel import SideChannelFailure, SideChannelServer
from ..stats import NixlKVConnectorStats, StatsCollector
from ..timeline_trace import TraceFile
from ..transport_facts import described
from ..wire.questions import Kept
from ..wire.ranks import decode_rank
from .content import ContentIndex
from .decode import DecodeSide
from .journal import Journal
from .loads import Loads
from .pins import PinBoard, PinState
from .prefill import PrefillSide
from .records import Records
from .reset import before_reset
from .turns import Turns

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

SPARE_BLOCKS = 4
"""What the engine wants to see free beyond a request's own blocks: room for tokens
that are speculated, and for the step after a load."""


_QUEUES = ("transfers", "pending_offers", "staging_out", "staging_in")
"""Tables of a worker in which KV waits to be moved."""


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
        self._block_size = block_size
        self._address = PrefillAddress(
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
            engine_id=engine_id,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )
        self._pins = PinBoard()
        self._stats = StatsCollector()
        trace = config.handoff_trace_file
        self._journal = Journal(
            engine_id, mode, self._stats, TraceFile(trace) if trace else None
        )
        self._records = Records(self._journal.added)
        self._commands: list[Command] = []
        self._loads = Loads(
            block_size,
            world_size,
            self._pins,
            self._records,
            self._stats,
            self._commands,
            self._take_apart,
        )
        self._prefill = PrefillSide(
            mode,
            mode is Mode.PUSH and config.chunked_push,
            self._address,
            block_size,
            world_size,
            suffix,
            self._pins,
            self._records,
            is_staged(
                current_platform, vllm_config.kv_transfer_config.kv_buffer_device
            ),
        )
        self._decode = DecodeSide(
            mode,
            config.push_registration_timeout,
            suffix,
            self._loads,
            self._records,
            self._commands,
        )
        self._turns: Turns | None = None
        if config.bidirectional_kv_xfer:
            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            self._turns = Turns(
                mode,
                config,
                self._address,
                block_size,
                ContentIndex(block_size, str(algorithm)),
                world_size,
                self._loads,
                self._pins,
                self._records,
                self._commands,
                self._token,
            )
        self._manager: KVCacheManager | None = None
        self._counted: Counter[str] = Counter()
        self._tables: dict[int, dict[str, int]] = {}
        self._ranks: list[dict[str, object]] = []
        self._server: SideChannelServer | None = None

    # ---- set-up and end

    def bind_manager(self, manager: "KVCacheManager") -> None:
        """The engine's cache manager, in whose pool blocks are pinned."""
        self._manager = manager
        # Other kinds of attention give blocks back that are out of their window.
        keeps_all = all(
            type(group.kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
            for group in manager.kv_cache_config.kv_cache_groups
        )
        self._pins.bind(
            manager.block_pool, lambda name: manager.get_blocks(name).blocks, keeps_all
        )
        before_reset(manager, self._free_all)
        if self._turns is not None:
            self._turns.bind(manager, keeps_all)

    def serve(self, workers: dict[tuple[int, int], NixlHandshakeMetadata]) -> None:
        """Open the side channel, now that the workers have described themselves.

        ``workers`` are by pipeline stage and tensor-parallel rank.

        Raises:
            SideChannelFailure: its address cannot be bound, or a worker is missing.
        """
        if self._server is not None or not workers:
            return
        places = product(range(self._address.pp_size), range(self._address.tp_size))
        missing = [place for place in places if place not in workers]
        if missing:
            raise SideChannelFailure(
                f"the workers {missing} (pipeline stage, tensor-parallel rank) have "
                "not described themselves; all must run the same connector"
            )
        told = [workers[place].rank_info for place in sorted(workers)]
        self._ranks = [described(decode_rank(info)) for info in told]
        self._server = SideChannelServer(
            (self._address.host, self._address.port),
            told,
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
        if self._turns is not None:
            self._turns.close()
        self._journal.close()

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
            earlier = params.earlier
            if params.problem:
                logger.warning(
                    "Request %s is computed here from its start: %s",
                    request.request_id,
                    params.problem,
                )
                self._records.count("invalid_params")
            if (
                self._turns is not None
                and earlier is not None
                and self._may_contact(request, earlier.host)
            ):
                self._turns.new_prefill(request, earlier, time.monotonic())
        elif isinstance(params, DecodeParams) and self._may_contact(
            request, params.address.host
        ):
            if self._address.pp_size > 1:
                logger.warning(
                    "Request %s is a decode leg, but this engine has "
                    "pipeline_parallel_size %d and can only prefill for others; its "
                    "prompt is computed here",
                    request.request_id,
                    self._address.pp_size,
                )
                self._records.count("decode_on_pipeline")
                self._decode.decline(request, params)
                return
            transfer_id = self._decode.new_request(request, params)
            if self._turns is not None:
                self._turns.new_decode(request, params, transfer_id)

    def matched_tokens(
        self, request: "Request", computed: int
    ) -> tuple[int | None, bool]:
        """Tokens that another engine will provide, and whether asynchronously.

        ``None``: that is not known yet.
        """
        request_id = RequestId(request.request_id)
        blocks = -(-request.num_tokens // self._block_size) + SPARE_BLOCKS
        self._pins.make_room(blocks)
        count: int | None = self._decode.matched(request_id, computed)
        if self._turns is not None:
            if not count:
                count = self._turns.matched(request_id, computed)
            self._turns.make_room(blocks)
        return count, bool(count)

    def allocated(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Blocks were allocated for a request."""
        request_id, now = RequestId(request.request_id), time.monotonic()
        self._decode.allocated(request_id, blocks, external_tokens, now)
        if self._turns is not None:
            self._turns.allocated(request_id, blocks, external_tokens, now)

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """A request has ended; returns the params for its client."""
        self._decode.finished(request)
        self._loads.finished(RequestId(request.request_id))
        self._journal.finished(RequestId(request.request_id))
        result = self._prefill.finished(request, block_ids)
        if self._turns is not None:
            return self._turns.finished(request, block_ids, time.monotonic()) or result
        return result

    # ---- steps

    def build_metadata(self, output: "SchedulerOutput") -> NixlConnectorMetadata:
        """This step's orders to the workers."""
        now = time.monotonic()
        self._pins.step()
        commands, offers = self._prefill.build(output, now)
        self._loads.warn_of_quarantine(now)
        self._journal.scheduled(output.num_scheduled_tokens, now)
        if self._turns is not None:
            self._turns.tick(now)
        commands += self._commands
        self._commands.clear()
        return NixlConnectorMetadata(
            tuple(commands),
            tuple(offers),
            self._loads.failing(),
            self._loads.completions_due or self._pins.due > 0,
            output.total_num_scheduled_tokens > 0,
        )

    def update(self, output: "KVConnectorOutput") -> None:
        """Take the workers' reports of a step and complete what they complete."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, NixlWorkerMetadata):
            for report in metadata.reports:
                self._take(report)
        self._loads.complete(output)

    def stats(self) -> NixlKVConnectorStats | None:
        """What the scheduler side has observed since the last call."""
        pinned = self._pins.counts()
        self._stats.held(names.QUARANTINED, pinned[PinState.QUIESCING])
        self._stats.held(names.RETAINED, pinned[PinState.RETAINED])
        self._stats.held(
            names.QUEUED_TRANSFERS,
            sum(
                sizes.get(name, 0)
                for sizes in self._tables.values()
                for name in _QUEUES
            ),
        )
        totals = Counter(self._totals())
        new = totals - self._counted
        self._counted = totals
        outcomes = {name: new[f"reader_{name}"] for name in names.REUSE_OUTCOMES}
        self._stats.reused(outcomes, new["reader_tokens"])
        for reason in names.RETAINED_ENDS:
            self._stats.more(names.DROPPED[reason], new[f"retention_{reason}"])
        return self._stats.take()

    def wants_steps(self) -> bool:
        """Whether an engine without requests should step on for a moment."""
        now = time.monotonic()
        return (
            bool(self._commands)
            or self._pins.due > 0
            or self._prefill.release_due(now)
            or self._loads.release_due(now)
            or (self._turns is not None and self._turns.release_due(now))
        )

    def yield_blocks(self) -> bool:
        """Whether a running request that lacks blocks should wait for a step."""
        if self._free_all():
            return True
        now = time.monotonic()
        return self._prefill.yields_soon(now) or (
            self._turns is not None and self._turns.yield_some(now)
        )

    def reset_cache(self) -> bool:
        """Let go of all that is kept; whether it has all gone."""
        return self._turns is None or self._turns.drop_all()

    def integrity(self) -> dict[str, object]:
        """Free blocks, pins by state, entries per table, totals, ranks."""
        free, total = self._pins.usage()
        tables = {
            "blocks_to_free": self._pins.due,
            **self._prefill.sizes(),
            **self._decode.sizes(),
            **self._loads.sizes(),
            **({} if self._turns is None else self._turns.sizes()),
        }
        for rank, sizes in sorted(self._tables.copy().items()):
            tables.update({f"rank{rank}_{name}": n for name, n in sizes.items()})
        return {
            "engine_id": self._engine_id,
            "mode": self._mode.value,
            "free_blocks": free,
            "total_blocks": total,
            "pins": self._pins.counts(),
            "tables": tables,
            "counters": self._totals(),
            "ranks": self._ranks,
        }

    def handoffs(self) -> list[dict[str, object]]:
        """The latest finished hand-offs, oldest first."""
        return self._records.latest()

    def failure(self, transfer_id: TransferId) -> dict[str, object] | None:
        """What became of one hand-off."""
        return self._records.failure(transfer_id)

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        """What is kept of a turn of a conversation."""
        return () if self._turns is None else self._turns.lookup(transfer_id)

    def release(self, transfer_id: TransferId) -> dict[str, bool]:
        """Let go of it in the next step; whether it is kept."""
        known = self._turns is not None and self._turns.release_soon(transfer_id)
        return {"retained": known}

    def _totals(self) -> dict[str, int]:
        kept = {} if self._turns is None else self._turns.counters()
        return {**self._records.totals(), **kept}

    def _free_all(self) -> bool:
        """Give back at once what is being released; whether there was any."""
        return self._pins.make_room(self._pins.usage()[1])

    def _may_contact(self, request: "Request", host: str) -> bool:
        if self._allowed.allows(host):
            return True
        logger.warning(
            "Request %s is served without KV of another engine: remote_host %r is not "
            "in allowed_peers",
            request.request_id,
            host,
        )
        self._records.count("peer_not_allowed")
        return False

    def _take_apart(self, request: "Request") -> None:
        """Make a parked request one that has not begun.

        The engine has no hook by which a connector recomputes one request under the
        policy ``fail``; this is what it does itself under the other.
        """
        assert self._manager is not None
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _take(self, report: RankReport) -> None:
        self._tables[report.rank] = report.tables
        for event in report.events:
            match event:
                case SenderClosed():
                    if self._turns is None or not self._turns.closed(
                        report.rank, event
                    ):
                        self._prefill.closed(report.rank, event)
                case Retracted():
                    self._prefill.retracted(report.rank, event)
                case Received():
                    self._loads.received(report.rank, event)
                case ReceiveFailed():
                    self._loads.failed(report.rank, event)
                case ReceiveQuiet():
                    self._loads.quiet(report.rank, event)
