# SPDX-License-Identifier: Apache-2.0
"""One turn of a rank's transfer work: commands in, NIXL, facts out.

:meth:`TransferLoop.step` never waits. It is what the transfer thread repeats, and
it can be called from any one thread instead.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm.logger import init_logger

from . import stats as names
from .agent import Agent, AgentError, PeerDisconnected
from .commands import (
    CancelReceive,
    Command,
    Expect,
    Receive,
    TellNotNeeded,
    Unwatch,
    Watch,
    Withdraw,
)
from .config import ConnectorConfig
from .handoff.actions import (
    Action,
    CloseReason,
    Event,
    Offer,
    Report,
    Send,
    SenderClosed,
    StartRead,
    StartWrite,
    TransferSize,
)
from .handoff.liveness import Liveness
from .handoff.receiver import ReceiverTable, Watches
from .handoff.sender import SenderTable
from .ids import AgentName, Mode, RegistrationId
from .peers import Peer, PeerDirectory
from .plan import Pages, Piece, PlanError, block_range, plan
from .side_channel import Address, Handshake, HandshakeClient
from .stats import StatsCollector
from .topology import TopologyError
from .transfers import TransferEnded, TransferPool
from .wire import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    Goodbye,
    HelloAck,
    LeaseGranted,
    LeaseRequest,
    Message,
    NotNeeded,
    Packet,
    Ping,
    Pong,
    RankInfo,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
    WireError,
    decode_packet,
    decode_rank,
    encode,
)

logger = init_logger(__name__)

TICK_SECONDS = 0.05
REPEAT_SECONDS = 2.0

Fence = Callable[[], bool]
"""Whether the computation that fills an offer's blocks has finished."""


class Pace(IntEnum):
    """How soon the next step is worth taking."""

    NOW = 0
    SOON = 1
    RELAXED = 2


@dataclass(frozen=True)
class Facts:
    """What one step brought, and how many entries each table then had."""

    events: tuple[Event, ...]
    tables: dict[str, int]


@dataclass(frozen=True)
class PendingOffer:
    """KV whose computation was launched, with the fence that tells its end."""

    offer: Offer
    fence: Fence


class TransferLoop:
    """All transfer state of one worker rank.

    Args:
        config: settings.
        mode: who moves the bytes.
        agent: the registered NIXL agent.
        local: this rank's description.
        publish: takes what the scheduler side should know.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        mode: Mode,
        agent: Agent,
        local: RankInfo,
        publish: Callable[[Facts], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._agent = agent
        self._local = local
        self._hello = encode(local)
        self._publish = publish
        self._clock = clock
        self._pages = Pages.of(local.regions)
        self._prepared = agent.prepare(local.regions, local.mem_type, None)
        self._peers = PeerDirectory(agent, local, config.enforce_handshake_compat)
        self._handshakes = HandshakeClient(config.handshake_timeout)
        self._sender = SenderTable(config.kv_lease_duration, local.block_size)
        self._receiver = ReceiverTable(mode, REPEAT_SECONDS)
        self._watches = Watches(config.kv_lease_duration / 3)
        self._liveness = Liveness(config.peer_timeout)
        self._transfers = TransferPool(agent)
        self._offers: deque[PendingOffer] = deque()
        self._engines: dict[Address, tuple[AgentName, ...]] = {}
        self._connecting: dict[Address, list[Receive | TellNotNeeded]] = {}
        self._next_tick = 0.0
        self._backlog: deque[Action] = deque()
        self._events: list[Event] = []
        self._tables: dict[str, int] = {}
        self.stats = StatsCollector()

    # ---- the turn

    def step(self, commands: Iterable[Command | PendingOffer]) -> Pace:
        """Act on ``commands`` and on all that has happened since the last step."""
        now = self._clock()
        for command in commands:
            self._obey(command, now)
        self._release_offers(now)
        heard = self._listen(now)
        for handshake in self._handshakes.poll(now):
            self._handshaken(handshake, now)
        for ended in self._transfers.advance():
            self._transfer_ended(ended, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        self._perform(now)
        tables = self._table_sizes()
        if self._events or tables != self._tables:
            self._publish(Facts(tuple(self._events), tables))
            self._events.clear()
            self._tables = tables
        return self._pace(heard)

    def close(self) -> None:
        """Take leave of all peers. The caller has stopped the forward thread."""
        for name in self._peers.idle_since(float("inf")):
            self._send(name, Goodbye(), self._clock())
        self._handshakes.close()
        self._agent.close()

    def _table_sizes(self) -> dict[str, int]:
        return {
            **self._sender.sizes(),
            **self._receiver.sizes(),
            "watches": len(self._watches),
            "transfers": len(self._transfers),
            "pending_offers": len(self._offers),
            "connecting": sum(len(waiting) for waiting in self._connecting.values()),
        }

    def _pace(self, heard: bool) -> Pace:
        if heard or len(self._transfers) or self._offers or self._backlog:
            return Pace.NOW
        if (
            self._receiver.busy
            or self._sender.busy
            or self._handshakes.pending
            or len(self._watches)
        ):
            return Pace.SOON
        return Pace.RELAXED

    # ---- commands

    def _obey(self, command: Command | PendingOffer, now: float) -> None:
        match command:
            case PendingOffer():
                self._offers.append(command)
            case Expect():
                self._sender.expect(
                    command.transfer_id, command.receivers, command.aliases, now
                )
            case Withdraw():
                self._do(
                    self._sender.withdraw(command.transfer_id, command.reason, now)
                )
            case Watch():
                self._watches.add(command.transfer_id, command.address)
                if command.address not in self._engines:
                    self._connect(command.address, now)
            case Unwatch():
                self._watches.drop(command.transfer_id)
            case Receive():
                self._receiver.receive(command.request, now)
                self._with_engine(command.address, command, now)
            case CancelReceive():
                self._do(
                    self._receiver.cancel(command.registration_id, command.reason, now)
                )
            case TellNotNeeded():
                self._with_engine(command.address, command, now)

    def _release_offers(self, now: float) -> None:
        while self._offers and self._offers[0].fence():
            self._do(self._sender.offer(self._offers.popleft().offer, now))

    # ---- connections

    def _connect(self, address: Address, now: float) -> None:
        self._connecting.setdefault(address, [])
        self._handshakes.start(address, now)

    def _with_engine(
        self, address: Address, command: Receive | TellNotNeeded, now: float
    ) -> None:
        if address in self._engines:
            self._connected(address, command, now)
            return
        self._connect(address, now)
        self._connecting[address].append(command)

    def _handshaken(self, handshake: Handshake, now: float) -> None:
        waiting = self._connecting.pop(handshake.address, [])
        failure = handshake.failure or self._admit(handshake, now)
        if failure is not None:
            self.stats.failure(names.FAILED_HANDSHAKES)
            logger.warning("%s", failure)
        for command in waiting:
            if failure is None:
                self._connected(handshake.address, command, now)
            elif isinstance(command, Receive):
                self._do(
                    self._receiver.unreachable(
                        command.request.registration_id, failure, now
                    )
                )

    def _admit(self, handshake: Handshake, now: float) -> str | None:
        where = f"{handshake.address[0]}:{handshake.address[1]}"
        if not handshake.ranks:
            return f"the engine at {where} has no workers"
        try:
            for info in handshake.ranks:
                self._replace_old(info, now)
                peer = self._peers.admit(info, now)
                if peer.refusal is not None:
                    return f"handshake with {where} refused: {peer.refusal}"
            sources = self._peers.sources(handshake.ranks)
        except (AgentError, TopologyError) as error:
            return f"handshake with {where} failed: {error}"
        self._engines[handshake.address] = sources
        return None

    def _connected(
        self, address: Address, command: Receive | TellNotNeeded, now: float
    ) -> None:
        sources = self._engines[address]
        if isinstance(command, Receive):
            self._do(
                self._receiver.connected(command.request.registration_id, sources, now)
            )
            return
        message = NotNeeded(command.transfer_id, command.receivers)
        for name in sources:
            self._do([Send(name, message)])

    def _replace_old(self, info: RankInfo, now: float) -> None:
        for name in self._peers.superseded_by(info):
            self._gone(name, "the engine was restarted", now)

    # ---- notifications

    def _listen(self, now: float) -> bool:
        try:
            received = self._agent.notifications()
        except AgentError as error:
            logger.warning("NIXL could not be asked for notifications: %s", error)
            return False
        for name, data in received:
            try:
                self._take(name, decode_packet(data), now)
            except (WireError, AgentError) as error:
                logger.warning("A notification of agent %s is ignored: %s", name, error)
        return bool(received)

    def _take(self, name: AgentName, packet: Packet, now: float) -> None:
        peer = self._peers.get(name)
        if packet.hello is not None:
            info = decode_rank(packet.hello)
            if info.agent_name != name:
                raise WireError(f"it introduces itself as {info.agent_name!r}")
            self._replace_old(info, now)
            peer = self._peers.admit(info, now)
            self._do([Send(name, HelloAck(peer.refusal))])
            peer.greeted = True
        if peer is None:
            raise WireError("the agent has not introduced itself")
        peer.used_at = now
        self._liveness.heard(name, now)
        if peer.refusal is not None:
            self._turn_away(name, peer, packet.body)
            return
        self._dispatch(name, peer, packet.body, now)

    def _turn_away(self, name: AgentName, peer: Peer, body: Message) -> None:
        if isinstance(body, Register | LeaseRequest) and peer.refusal is not None:
            self._do([Send(name, Refused(body.registration_id, peer.refusal))])

    def _dispatch(self, name: AgentName, peer: Peer, body: Message, now: float) -> None:
        sender, receiver = self._sender, self._receiver
        match body:
            case Register():
                self._do(sender.register(name, body, now))
            case LeaseRequest():
                self._do(sender.lease_request(name, body, now))
            case Cancel():
                self._do(
                    sender.cancel(name, body.registration_id, body.transfer_id, now)
                )
            case NotNeeded():
                self._do(sender.not_needed(body.transfer_id, body.receivers, now))
            case ReadDone():
                self._do(sender.read_done(name, body, now))
            case Renew():
                sender.renew(body.transfer_ids, now)
            case Accepted():
                self._do(receiver.accepted(name, body.registration_id))
            case LeaseGranted():
                self._do(receiver.granted(name, body, now))
            case Done():
                self._do(receiver.piece(name, body, now))
            case Finished():
                self._do(receiver.finished(name, body.registration_id, now))
            case Refused():
                self._do(receiver.refused(name, body.registration_id, body.reason, now))
            case Cancelled():
                self._do(receiver.cancelled(name, body.registration_id))
            case ReadConfirmed():
                if not body.ok:
                    self.stats.failure(names.LATE_NOTIFICATIONS)
                self._do(
                    receiver.read_confirmed(name, body.registration_id, body.ok, now)
                )
            case HelloAck():
                peer.greeted = True
                if body.refusal is not None:
                    logger.warning(
                        "Engine %s refuses: %s", peer.info.engine_id, body.refusal
                    )
            case Ping():
                self._do([Send(name, Pong())])
            case Pong():
                pass
            case Goodbye():
                # Its process has ended all its transfers before it said so.
                self._gone(name, "the engine was shut down", now)

    # ---- transfers

    def _start_write(self, action: StartWrite, now: float) -> None:
        positions = block_range(action.want, self._local.block_size)
        local = [
            group[positions.start : positions.stop] for group in action.offer.blocks
        ]
        registration_id = action.registration_id

        def done(seq: int, total: int, piece: Piece) -> bytes:
            body = Done(registration_id, seq, total, piece.bytes, piece.descriptors)
            return encode(Packet(PROTOCOL_VERSION, None, body))

        failure = self._start(
            "WRITE", action.peer, registration_id, local, action.remote_blocks, done
        )
        if failure is not None:
            self._do(
                self._sender.written(registration_id, TransferSize(), failure, now)
            )

    def _start_read(self, action: StartRead, now: float) -> None:
        failure = self._start(
            "READ",
            action.peer,
            action.registration_id,
            action.local_blocks,
            action.remote_blocks,
            lambda *_: b"",
        )
        if failure is not None:
            self._do(
                self._receiver.read_ended(
                    action.peer, action.registration_id, TransferSize(), failure, now
                )
            )

    def _start(
        self,
        operation: str,
        name: AgentName,
        registration_id: RegistrationId,
        local: Any,
        remote: Any,
        notification: Callable[[int, int, Piece], bytes],
    ) -> str | None:
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            return "the peer was lost"
        try:
            pieces = plan(
                self._pages,
                peer.info.regions[0].num_blocks,
                local,
                remote,
                self._config.max_transfer_bytes,
            )
            prepared = self._peers.prepared(name)
        except (PlanError, AgentError) as error:
            self.stats.failure(names.FAILED_TRANSFERS)
            return str(error)
        self._transfers.start(
            operation,
            name,
            registration_id,
            self._prepared,
            prepared,
            pieces,
            notification,
        )
        return None

    def _transfer_ended(self, ended: TransferEnded, now: float) -> None:
        if ended.failure is None:
            self.stats.transfer(
                ended.seconds,
                ended.post_seconds,
                ended.size.bytes,
                ended.size.descriptors,
            )
        else:
            self.stats.failure(names.FAILED_TRANSFERS)
            logger.warning(
                "%s for registration %s with agent %s failed: %s",
                ended.operation,
                ended.registration_id,
                ended.peer,
                ended.failure,
            )
        if ended.operation == "WRITE":
            actions = self._sender.written(
                ended.registration_id, ended.size, ended.failure, now
            )
        else:
            actions = self._receiver.read_ended(
                ended.peer, ended.registration_id, ended.size, ended.failure, now
            )
        self._do(actions)

    # ---- time and peers

    def _tick(self, now: float) -> None:
        self._do(self._sender.tick(now))
        self._do(self._receiver.tick(now))
        for address, transfer_ids in self._watches.due(now).items():
            for name in self._engines.get(address, ()):
                self._do([Send(name, Renew(transfer_ids))])
        owing = self._receiver.peers() | self._sender.peers()
        judged = {name for name in owing if not self._is_lost(name)}
        ping, lost = self._liveness.tick(judged, now)
        for name in ping:
            self._do([Send(name, Ping())])
        for name in lost:
            self._lose(name, f"no answer for {self._config.peer_timeout:g} s", now)
        for name in self._peers.provably_gone():
            self._gone(name, "its process has ended", now)
        for name in self._peers.idle_since(now - self._config.engine_ttl):
            if name not in owing and not self._transfers.uses(name):
                self._drop(name)

    def _is_lost(self, name: AgentName) -> bool:
        peer = self._peers.get(name)
        return peer is None or peer.lost

    def _lose(self, name: AgentName, reason: str, now: float) -> None:
        """A peer is out of reach; it may still be able to write."""
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            return
        peer.lost = True
        logger.warning(
            "Agent %s of engine %s is lost: %s", name, peer.info.engine_id, reason
        )
        self._forget_engine(name)
        text = f"the engine {peer.info.engine_id} was lost: {reason}"
        self._transfers.fail_peer(name, text)
        self._do(self._sender.peer_lost(name, now))
        self._do(self._receiver.peer_lost(name, text, now))

    def _gone(self, name: AgentName, reason: str, now: float) -> None:
        """It is proven that a peer exists no more."""
        peer = self._peers.get(name)
        if peer is None:
            return
        text = f"the engine {peer.info.engine_id} is gone: {reason}"
        peer.lost = True
        self._forget_engine(name)
        self._transfers.fail_peer(name, text)
        self._do(self._sender.peer_lost(name, now))
        self._do(self._receiver.peer_gone(name, text, now))
        self._liveness.forget(name)
        if not self._transfers.uses(name):
            self._drop(name)

    def _drop(self, name: AgentName) -> None:
        self._forget_engine(name)
        self._liveness.forget(name)
        self._peers.remove(name)

    def _forget_engine(self, name: AgentName) -> None:
        for address, sources in list(self._engines.items()):
            if name in sources:
                del self._engines[address]

    # ---- performing what the state machines ask

    def _do(self, actions: Iterable[Action]) -> None:
        self._backlog.extend(actions)

    def _perform(self, now: float) -> None:
        while self._backlog:
            action = self._backlog.popleft()
            match action:
                case Send():
                    self._send(action.peer, action.message, now)
                case StartWrite():
                    self._start_write(action, now)
                case StartRead():
                    self._start_read(action, now)
                case Report():
                    if (
                        isinstance(action.event, SenderClosed)
                        and action.event.reason is CloseReason.EXPIRED
                    ):
                        self.stats.failure(names.EXPIRED)
                    self._events.append(action.event)

    def _send(self, name: AgentName, message: Message, now: float) -> None:
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            return
        hello = None if peer.greeted else self._hello
        try:
            self._agent.notify(name, encode(Packet(PROTOCOL_VERSION, hello, message)))
        except PeerDisconnected as error:
            self.stats.failure(names.FAILED_NOTIFICATIONS)
            self._lose(name, str(error), now)
        except AgentError as error:
            self.stats.failure(names.FAILED_NOTIFICATIONS)
            logger.warning(
                "%s to agent %s was not sent: %s", type(message).__name__, name, error
            )
