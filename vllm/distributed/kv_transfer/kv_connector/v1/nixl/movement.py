# SPDX-License-Identifier: Apache-2.0
"""From what the state machines want moved to NIXL transfers, and their ends."""

from collections.abc import Callable, Iterator

from vllm.logger import init_logger

from . import stats as names
from .agent import Agent, AgentError
from .config import ConnectorConfig
from .connections import Connections
from .handoff.actions import StartRead, StartWrite, TransferSize
from .ids import AgentName
from .pairing import PairingError
from .plan import PlanError, plan
from .stats import StatsCollector
from .topology import TopologyError
from .transfers import TransferEnded, TransferPool
from .wire.codec import PROTOCOL_VERSION, encode
from .wire.notifications import Done, Packet
from .wire.ranks import RankInfo

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
        self._agent = agent
        self._pool = TransferPool(agent)

    def __len__(self) -> int:
        return len(self._pool)

    def write(self, action: StartWrite) -> str | None:
        """Queue a WRITE; returns why it cannot be, if so."""

        def done(seq: int, total: int, size: TransferSize) -> bytes:
            body = Done(
                action.registration_id,
                action.chunk,
                action.last,
                seq,
                total,
                size.bytes,
                size.descriptors,
            )
            return encode(Packet(PROTOCOL_VERSION, None, body))

        return self._start(
            "WRITE", action, action.chunk, (action.part, action.parts), done
        )

    def read(self, action: StartRead) -> str | None:
        """Queue a READ; returns why it cannot be, if so."""
        return self._start("READ", action, 0, (0, 1), lambda *_: b"")

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

    def _start(
        self,
        operation: str,
        action: StartWrite | StartRead,
        chunk: int,
        part: tuple[int, int],
        notification: Callable[[int, int, TransferSize], bytes],
    ) -> str | None:
        name = action.peer
        peer = self._connections.usable(name)
        if peer is None:
            return "the peer was lost"
        try:
            index, parts = part
            prepared = self._connections.prepared(name, operation == "WRITE", parts)
            pieces = plan(
                prepared.lists.parts[index],
                action.want,
                action.local_blocks,
                action.remote_blocks,
                self._max_bytes,
            )
            if not pieces and (told := notification(0, 1, TransferSize())):
                # What is not moved must be counted all the same.
                self._agent.notify(name, told)
        except (PairingError, PlanError, TopologyError, AgentError) as error:
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
            prepared.local,
            prepared.remote,
            pieces,
            lambda seq, total, piece: notification(
                seq, total, TransferSize(piece.bytes, piece.descriptors)
            ),
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
