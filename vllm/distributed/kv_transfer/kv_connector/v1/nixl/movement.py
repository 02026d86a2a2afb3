# SPDX-License-Identifier: Apache-2.0
"""From what the state machines want moved to NIXL transfers, and their ends."""

from collections.abc import Callable, Iterator

from vllm.logger import init_logger

from . import stats as names
from .agent import Agent, AgentError
from .config import ConnectorConfig
from .connections import Connections
from .handoff.actions import StartRead, StartWrite
from .ids import AgentName
from .layout import parts_of_regions
from .plan import Pages, Piece, PlanError, plan
from .stats import StatsCollector
from .transfers import TransferEnded, TransferPool
from .wire import PROTOCOL_VERSION, BlockArray, Done, Packet, RankInfo, encode

logger = init_logger(__name__)


class Movement:
    """The WRITEs and READs of one rank."""

    def __init__(
        self,
        config: ConnectorConfig,
        agent: Agent,
        local: RankInfo,
        connections: Connections,
        stats: StatsCollector,
    ) -> None:
        self._max_bytes = config.max_transfer_bytes
        self._connections = connections
        self._stats = stats
        self._regions = local.regions
        self._pages = Pages.of(local.regions)
        self._pages_of_part: dict[tuple[int, int], Pages] = {}
        self._prepared = agent.prepare(local.regions, local.mem_type, None)
        self._pool = TransferPool(agent)

    def __len__(self) -> int:
        return len(self._pool)

    def write(self, action: StartWrite) -> str | None:
        """Queue a WRITE; returns why it cannot be, if so."""

        def done(seq: int, total: int, piece: Piece) -> bytes:
            body = Done(
                action.registration_id,
                action.chunk,
                action.last,
                seq,
                total,
                piece.bytes,
                piece.descriptors,
            )
            return encode(Packet(PROTOCOL_VERSION, None, body))

        pages = self._part(action.part, action.parts)
        return self._start("WRITE", action, action.chunk, pages, done)

    def read(self, action: StartRead) -> str | None:
        """Queue a READ; returns why it cannot be, if so."""
        return self._start("READ", action, 0, self._pages, lambda *_: b"")

    def advance(self) -> Iterator[TransferEnded]:
        """See :meth:`TransferPool.advance`; what has ended is counted."""
        for ended in self._pool.advance():
            self._count(ended)
            yield ended

    def fail_peer(self, peer: AgentName, reason: str) -> None:
        """See :meth:`TransferPool.fail_peer`."""
        self._pool.fail_peer(peer, reason)

    def post_no_more(self) -> None:
        """See :meth:`TransferPool.post_no_more`."""
        self._pool.post_no_more()

    def uses(self, peer: AgentName) -> bool:
        """See :meth:`TransferPool.uses`."""
        return self._pool.uses(peer)

    def _part(self, part: int, parts: int) -> Pages:
        if parts == 1:
            return self._pages
        key = part, parts
        if key not in self._pages_of_part:
            found = parts_of_regions(self._regions, parts)
            chosen = {i for i, of in enumerate(found) if of == part}
            self._pages_of_part[key] = self._pages.only(chosen)
        return self._pages_of_part[key]

    def _start(
        self,
        operation: str,
        action: StartWrite | StartRead,
        chunk: int,
        pages: Pages,
        notification: Callable[[int, int, Piece], bytes],
    ) -> str | None:
        name = action.peer
        peer = self._connections.usable(name)
        if peer is None:
            return "the peer was lost"
        try:
            prepared = self._connections.prepared(name)
            local, remote = _kept(action)
            pieces = plan(
                pages,
                peer.info.regions[0].num_blocks,
                local,
                remote,
                self._max_bytes,
            )
        except (PlanError, AgentError) as error:
            self._stats.failure(names.FAILED_TRANSFERS)
            return str(error)
        except Exception as error:
            logger.exception("%s could not be planned", operation)
            return f"internal error: {error}"
        self._pool.start(
            operation,
            name,
            action.registration_id,
            chunk,
            self._prepared,
            prepared,
            pieces,
            notification,
        )
        return None

    def _count(self, ended: TransferEnded) -> None:
        if ended.failure is None:
            self._stats.transfer(
                ended.seconds,
                ended.post_seconds,
                ended.size.bytes,
                ended.size.descriptors,
            )
            return
        self._stats.failure(names.FAILED_TRANSFERS)
        logger.warning(
            "%s for registration %s with agent %s failed: %s",
            ended.operation,
            ended.registration_id,
            ended.peer,
            ended.failure,
        )


def _kept(
    action: StartWrite | StartRead,
) -> tuple[list[BlockArray], list[BlockArray]]:
    local, remote = list(action.local_blocks), list(action.remote_blocks)
    into, out_of = (
        (remote, local) if isinstance(action, StartWrite) else (local, remote)
    )
    for group, ids in enumerate(into):
        wanted = ids != 0
        into[group], out_of[group] = ids[wanted], out_of[group][wanted]
        if not out_of[group].all():
            raise PlanError("blocks of a sliding window were let go of")
    return local, remote
