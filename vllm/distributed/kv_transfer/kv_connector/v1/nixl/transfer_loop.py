# SPDX-License-Identifier: Apache-2.0
"""One turn of a rank's transfer work: commands in, NIXL, facts out.

:meth:`TransferLoop.step` never waits. It is what the transfer thread repeats, and
it can be called from any one thread instead.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from vllm.logger import init_logger

from . import stats as names
from .agent import Agent
from .auth import Token
from .commands import (
    CancelReceive,
    Expect,
    Keep,
    Receive,
    Retire,
    Retract,
    TellNotNeeded,
    Unwatch,
    Watch,
    Withdraw,
)
from .config import ConnectorConfig
from .connections import (
    ConnectionEvent,
    Connections,
    Engine,
    EngineDown,
    EngineUp,
    PeerGone,
    PeerLost,
)
from .correspondence import Correspondence
from .ending import STEP_SECONDS, Ending
from .handoff.actions import (
    Action,
    Event,
    Report,
    Send,
    StartRead,
    StartWrite,
    TransferSize,
)
from .handoff.delivery import HandoffMessage, to_kept, to_receiver, to_sender
from .handoff.kept import KeptTable, is_kept
from .handoff.receiver import ReceiverTable
from .handoff.sender import SenderTable
from .handoff.watches import Watches
from .ids import AgentName, Mode
from .movement import Movement
from .orders import Facts, Order, Pace, PendingOffer
from .peers import Peer
from .side_channel import Address
from .stats import StatsCollector
from .transfers import TransferEnded
from .wire.notifications import (
    Cancel,
    Goodbye,
    LeaseRequest,
    NotNeeded,
    Ping,
    ReadConfirmed,
    ReadDone,
    Register,
    Renew,
)
from .wire.ranks import RankInfo

logger = init_logger(__name__)

TICK_SECONDS = 0.05
REPEAT_SECONDS = 2.0
STALL_SECONDS = 1.0
CLOSE_SECONDS = 2.0
"""Bound on the end of what is posted, when nothing more is."""


class TransferLoop:
    """All transfer state of one worker rank.

    Args:
        config: settings.
        agent: the registered NIXL agent.
        local: this rank's description.
        token: the secret that peers must hold, if any.
        publish: takes what the scheduler side should know.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        agent: Agent,
        local: RankInfo,
        mode: Mode,
        token: Token | None,
        publish: Callable[[Facts], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._agent = agent
        self._local = local
        self._mode = mode
        self._publish = publish
        self._clock = clock
        self.stats = StatsCollector()
        self._connections = Connections(config, agent, local, token)
        self._movement = Movement(config, agent, local, self._connections, self.stats)
        self._backlog: deque[Action] = deque()
        self._correspondence = Correspondence(
            agent, self._connections, self.stats, clock, self._backlog.extend
        )
        self._sender = SenderTable(config.kv_lease_duration, local.block_size)
        self._kept = KeptTable(config.kv_lease_duration, local.block_size)
        self._receiver = ReceiverTable(REPEAT_SECONDS)
        self._watches = Watches(config.kv_lease_duration / 3)
        self._offers: deque[tuple[PendingOffer, float]] = deque()
        self._waiting: dict[Address, list[Receive | TellNotNeeded]] = {}
        self._next_tick = 0.0
        self._last_step: float | None = None
        self._events: list[Event] = []
        self._tables: dict[str, int] = {}

    # ---- the turn

    def step(self, commands: Iterable[Order]) -> Pace:
        """Act on ``commands`` and on all that has happened since the last step."""
        now = self._clock()
        if self._last_step is not None and now - self._last_step > STALL_SECONDS:
            self._connections.excuse(now)
        self._last_step = now
        for command in commands:
            self._obey_safely(command, now)
        self._release_offers(now)
        heard = self._correspondence.listen(now, self._dispatch)
        for event in self._connections.poll(now):
            self._connection_changed(event, now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        self._perform(now)
        # What this step has begun is posted by this step.
        for ended in self._movement.advance():
            self._transfer_ended(ended, now)
        self._perform(now)
        tables = self._table_sizes()
        if self._events or tables != self._tables:
            self._publish(Facts(tuple(self._events), tables))
            self._events.clear()
            self._tables = tables
        return self._pace(heard)

    def close(self, patience: float = 0.0) -> None:
        """End all transfers and take leave of all peers.

        What is computed may still be taken, and READs under way may end, for up to
        ``patience`` seconds. A peer with which a transfer does not end in time is told
        nothing, since the leave is a promise that nothing is written any more.
        """
        ending = Ending(
            self._sender,
            self._kept,
            self._receiver,
            self._movement,
            self._connections,
        )
        deadline = self._clock() + patience
        while self._offers and self._clock() < deadline:
            # Its computation is about to end.
            self.step(())
            time.sleep(STEP_SECONDS)
        self._do(ending.begin(self._clock()))
        self.step(())
        while ending.is_awaited() and self._clock() < deadline:
            time.sleep(STEP_SECONDS)
            self.step(())
        ending.tell_left(patience)
        self._movement.post_no_more()
        deadline = self._clock() + CLOSE_SECONDS
        while len(self._movement) and self._clock() < deadline:
            for ended in self._movement.advance():
                self._transfer_ended(ended, self._clock())
            self._perform(self._clock())
        for name in self._connections.all():
            if not self._movement.uses(name):
                self._correspondence.send(name, Goodbye())
        self._connections.close()
        self._agent.close()

    def _table_sizes(self) -> dict[str, int]:
        return {
            **self._sender.sizes(),
            **self._kept.sizes(),
            **self._receiver.sizes(),
            "watches": len(self._watches),
            "transfers": len(self._movement),
            "pending_offers": len(self._offers),
            "connecting": sum(len(waiting) for waiting in self._waiting.values()),
        }

    def _pace(self, heard: bool) -> Pace:
        if heard or len(self._movement) or self._offers or self._backlog:
            return Pace.NOW
        pulled = self._mode is Mode.PULL
        if (
            self._receiver.busy
            or self._kept.busy
            or self._connections.pending
            or len(self._watches)
            or (self._sender.urgent and not pulled)
        ):
            return Pace.SOON
        if self._sender.urgent:
            # Whoever asks for a lease reads meanwhile.
            return Pace.STEADY
        # Nobody asks for what will be pulled before it is computed.
        return Pace.LATER if self._sender.busy and not pulled else Pace.RELAXED

    # ---- commands

    def _obey_safely(self, command: Order, now: float) -> None:
        try:
            self._obey(command, now)
        except Exception:
            logger.exception("%s failed", type(command).__name__)
            if isinstance(command, Receive):
                registration_id = command.request.registration_id
                self._do(self._receiver.cancel(registration_id, "internal error", now))

    def _obey(self, command: Order, now: float) -> None:
        match command:
            case PendingOffer():
                self._offers.append((command, now))
            case Expect():
                self._sender.expect(
                    command.transfer_id, command.receivers, command.aliases, now
                )
            case Withdraw():
                self._do(
                    self._sender.withdraw(command.transfer_id, command.reason, now)
                )
            case Retract():
                self._do(self._sender.retract(command.transfer_id, command.generation))
            case Keep():
                self._kept.keep(command.offer, now)
            case Retire():
                self._do(self._kept.retire(command.name, now))
            case Watch():
                self._watches.add(command.transfer_id, command.address)
                if self._connections.engine(command.address) is None:
                    self._connections.connect(command.address, now)
            case Unwatch():
                self._watches.drop(command.transfer_id)
            case Receive():
                self._receiver.receive(command.complete(), now)
                self._with_engine(command.address, command, now)
            case CancelReceive():
                self._do(
                    self._receiver.cancel(command.registration_id, command.reason, now)
                )
            case TellNotNeeded():
                self._with_engine(command.address, command, now)

    def _release_offers(self, now: float) -> None:
        while self._offers and self._offers[0][0].fence():
            pending, taken_at = self._offers.popleft()
            # One that is let through at once may have waited for this thread only.
            computed_at = pending.launched_at if taken_at == now else now
            self._do(self._sender.offer(pending.offer.complete(), now, computed_at))

    # ---- connections

    def _with_engine(
        self, address: Address, command: Receive | TellNotNeeded, now: float
    ) -> None:
        engine = self._connections.engine(address)
        if engine is not None:
            self._connected(engine, command, now)
            return
        self._waiting.setdefault(address, []).append(command)
        self._connections.connect(address, now)

    def _connected(
        self, engine: Engine, command: Receive | TellNotNeeded, now: float
    ) -> None:
        if isinstance(command, TellNotNeeded):
            message = NotNeeded(command.transfer_id, command.receivers)
            self._do(Send(name, message) for name in engine.all)
            return
        request = command.request
        over = self._receiver.transfer_id(request.registration_id) is None
        self._do(self._receiver.connected(request.registration_id, engine.sources, now))
        if not is_kept(request.transfer_id):
            # Nobody else tells them that this receiver does not ask.
            message = NotNeeded(request.transfer_id, 1)
            untold = engine.all if over else engine.idle
            self._do(Send(name, message) for name in untold)

    def _connection_changed(self, event: ConnectionEvent, now: float) -> None:
        match event:
            case EngineUp():
                for command in self._waiting.pop(event.address, []):
                    self._connected(event.engine, command, now)
            case EngineDown():
                self.stats.failure(names.FAILED_HANDSHAKES)
                for command in self._waiting.pop(event.address, []):
                    if isinstance(command, Receive):
                        registration_id = command.request.registration_id
                        self._do(
                            self._receiver.unreachable(
                                registration_id, event.reason, now
                            )
                        )
            case PeerLost():
                self._movement.fail_peer(event.peer, event.reason)
                self._do(self._sender.peer_lost(event.peer, now))
                self._do(self._receiver.peer_lost(event.peer, event.reason, now))
            case PeerGone():
                self._movement.fail_peer(event.peer, event.reason)
                self._do(self._sender.peer_gone(event.peer, now))
                self._do(self._kept.peer_gone(event.peer, now))
                self._do(self._receiver.peer_gone(event.peer, event.reason, now))
                if not self._movement.uses(event.peer):
                    self._connections.drop(event.peer)

    # ---- what peers say of KV

    def _dispatch(
        self, name: AgentName, peer: Peer, body: HandoffMessage, now: float
    ) -> None:
        match body:
            case LeaseRequest() | ReadDone() | Cancel() if is_kept(body.transfer_id):
                self._do(to_kept(self._kept, name, body, now))
            case (
                Register()
                | LeaseRequest()
                | Cancel()
                | NotNeeded()
                | ReadDone()
                | Renew()
            ):
                readers = self._connections.readers(name)
                self._do(to_sender(self._sender, name, body, now, readers))
            case _:
                if isinstance(body, ReadConfirmed) and not body.ok:
                    self.stats.failure(names.LATE_NOTIFICATIONS)
                self._do(to_receiver(self._receiver, name, body, now))

    # ---- transfers

    def _start_write(self, action: StartWrite, now: float) -> None:
        failure = self._movement.write(action)
        if failure is not None:
            self._do(
                self._sender.written(
                    action.peer,
                    action.registration_id,
                    action.chunk,
                    TransferSize(),
                    failure,
                    now,
                )
            )

    def _start_read(self, action: StartRead, now: float) -> None:
        failure = self._movement.read(action)
        if failure is not None:
            self._do(
                self._receiver.read_ended(
                    action.peer, action.registration_id, TransferSize(), failure, now
                )
            )

    def _transfer_ended(self, ended: TransferEnded, now: float) -> None:
        if ended.operation == "WRITE":
            actions = self._sender.written(
                ended.peer,
                ended.registration_id,
                ended.chunk,
                ended.size,
                ended.failure,
                now,
                ended.period,
            )
        else:
            actions = self._receiver.read_ended(
                ended.peer, ended.registration_id, ended.size, ended.failure, now
            )
        self._do(actions)

    # ---- time

    def _tick(self, now: float) -> None:
        self._do(self._sender.tick(now))
        self._do(self._kept.tick(now))
        self._do(self._receiver.tick(now))
        for address, transfer_ids in self._watches.due(now).items():
            engine = self._connections.engine(address)
            message = Renew(transfer_ids)
            self._do(Send(name, message) for name in (engine.all if engine else ()))
        owing = self._receiver.peers() | self._sender.peers() | self._kept.peers()
        for name in self._connections.tick(owing, now):
            self._do([Send(name, Ping())])
        for name in self._connections.expendable(now):
            if name not in owing and not self._movement.uses(name):
                self._connections.drop(name)

    # ---- performing what the state machines ask

    def _do(self, actions: Iterable[Action]) -> None:
        self._backlog.extend(actions)

    def _perform(self, now: float) -> None:
        while self._backlog:
            action = self._backlog.popleft()
            match action:
                case Send():
                    self._correspondence.send(action.peer, action.message)
                case StartWrite():
                    self._start_write(action, now)
                case StartRead():
                    self._start_read(action, now)
                case Report():
                    self._events.append(action.event)
