# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode ranks as state machines, on a network that a test controls.

Nothing happens by itself: each method is one thing that may happen next. What the
memory really holds is tracked beside the tables, so that a table which gives
memory back too early is caught by what is then in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Event,
    Offer,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Report,
    Send,
    SenderClosed,
    StartRead,
    StartWrite,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiveRequest,
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    LeaseGranted,
    LeaseRequest,
    Message,
    NotNeeded,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
    Want,
)

BLOCK = 4
PROMPT = 10
POSITIONS = -(-PROMPT // BLOCK)

REPEAT = 2.0
LEASE = 7.0
TIMEOUT = 15.0

POOL = 4 * POSITIONS
"""Blocks of each engine: few, so that they are soon used again."""

Content = tuple[TransferId, int] | None
"""What a block holds: a position of a prompt, or nothing that may be used."""


_Table = TypeVar("_Table", SenderTable, ReceiverTable)


class Violation(AssertionError):
    """Something happened that must not happen."""


@dataclass(frozen=True)
class Envelope:
    """A message on its way."""

    source: AgentName
    target: AgentName
    message: Message


@dataclass
class Write:
    """A WRITE under way, in pieces that may land at any time once posted."""

    prefill: AgentName
    action: StartWrite
    unposted: list[int]
    total: int
    posted: list[int] = field(default_factory=list)
    failure: str | None = None


@dataclass
class Read:
    """A READ under way."""

    decode: AgentName
    action: StartRead


@dataclass
class Attempt:
    """What is true of one registration."""

    decode: AgentName
    transfer_id: TransferId
    request: ReceiveRequest
    connecting: bool = True
    failed: bool = False
    over: bool = False
    cancelled: bool = False
    landed: set[tuple[AgentName, int]] = field(default_factory=set)
    pieces: dict[AgentName, int] = field(default_factory=dict)
    confirmed: set[AgentName] = field(default_factory=set)


@dataclass
class Prefill:
    """A prefill request, as the scheduler side of its engine knows it."""

    generation: int = 0
    blocks: tuple[int, ...] = ()
    closed: set[AgentName] = field(default_factory=set)


class Simulation:
    """One prefill engine of some ranks, and decode engines of one rank each."""

    def __init__(
        self,
        mode: Mode,
        prefill_ranks: int = 1,
        decodes: int = 1,
        pieces: int = 2,
        sender: type[SenderTable] = SenderTable,
        receiver: type[ReceiverTable] = ReceiverTable,
    ) -> None:
        self.mode = mode
        self.now = 0.0
        self.pieces = pieces
        self.senders = {
            AgentName(f"P{rank}"): sender(LEASE, BLOCK) for rank in range(prefill_ranks)
        }
        self.receivers = {
            AgentName(f"D{index}"): receiver(mode, REPEAT) for index in range(decodes)
        }
        self.network: list[Envelope] = []
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.attempts: dict[RegistrationId, Attempt] = {}
        self.prefills: dict[TransferId, Prefill] = {}
        self.generation = 0
        self.dead: set[AgentName] = set()
        self.lost: set[tuple[AgentName, AgentName]] = set()
        self.leases: dict[tuple[AgentName, RegistrationId], tuple[int, float]] = {}
        self.prefill_free = list(range(POOL))
        self.decode_free = {name: list(range(POOL)) for name in self.receivers}
        self.prefill_memory: dict[tuple[AgentName, int], Content] = {}
        self.decode_memory: dict[tuple[AgentName, int, AgentName], Content] = {}

    # ---- the prefill engine's scheduler

    def expect(
        self,
        transfer_id: TransferId,
        receivers: int | None,
        aliases: tuple[TransferId, ...] = (),
    ) -> None:
        """A prefill request arrives."""
        self.prefills[transfer_id] = Prefill()
        for _, sender in self._alive(self.senders):
            sender.expect(transfer_id, receivers, aliases, self.now)

    def offer(self, transfer_id: TransferId) -> bool:
        """Its prompt is computed; whether there were blocks for it."""
        if len(self.prefill_free) < POSITIONS:
            return False
        self.generation += 1
        prefill = self.prefills[transfer_id]
        prefill.generation = self.generation
        prefill.blocks = tuple(self.prefill_free[:POSITIONS])
        del self.prefill_free[:POSITIONS]
        offer = Offer(
            transfer_id,
            self.generation,
            PROMPT,
            transfer_id.encode(),
            (np.asarray(prefill.blocks, dtype=np.int32),),
        )
        for name, sender in self._alive(self.senders):
            for position, block in enumerate(prefill.blocks):
                self.prefill_memory[name, block] = (transfer_id, position)
            self._perform(name, sender.offer(offer, self.now))
        return True

    def withdraw(self, transfer_id: TransferId) -> None:
        """The prefill request is aborted."""
        prefill = self.prefills[transfer_id]
        if not prefill.blocks:
            del self.prefills[transfer_id]
        for name, sender in self._alive(self.senders):
            for key, (generation, _) in list(self.leases.items()):
                if key[0] == name and generation == prefill.generation:
                    del self.leases[key]
            self._perform(name, sender.withdraw(transfer_id, "aborted", self.now))

    # ---- the decode engines' schedulers

    def start(
        self,
        decode: AgentName,
        registration_id: RegistrationId,
        transfer_id: TransferId,
        first_block: int = 0,
        called: TransferId | None = None,
    ) -> bool:
        """A decode request is given blocks; whether there were any."""
        count = POSITIONS - first_block
        free = self.decode_free[decode]
        if decode in self.dead or len(free) < count:
            return False
        blocks = free[:count]
        del free[:count]
        first = first_block * BLOCK
        request = ReceiveRequest(
            registration_id,
            called or transfer_id,
            Want(PROMPT, first, PROMPT - first, transfer_id.encode()),
            (np.asarray(blocks, dtype=np.int32),),
            TIMEOUT,
        )
        self.attempts[registration_id] = Attempt(decode, transfer_id, request)
        self.receivers[decode].receive(request, self.now)
        return True

    def connect(self, registration_id: RegistrationId) -> None:
        """The attempt's engine connects to the prefill engine, if that lives."""
        if self.dead & set(self.senders):
            self.unreachable(registration_id)
            return
        attempt = self.attempts[registration_id]
        attempt.connecting = False
        decode = attempt.decode
        for name in self.senders:
            self.lost.discard((decode, name))
        self._perform(
            decode,
            self.receivers[decode].connected(
                registration_id, tuple(self.senders), self.now
            ),
        )

    def unreachable(self, registration_id: RegistrationId) -> None:
        """It cannot be connected."""
        attempt = self.attempts[registration_id]
        attempt.connecting = False
        decode = attempt.decode
        self._perform(
            decode,
            self.receivers[decode].unreachable(registration_id, "no route", self.now),
        )

    def cancel(self, registration_id: RegistrationId) -> None:
        """The decode request is aborted."""
        attempt = self.attempts[registration_id]
        attempt.cancelled = True
        actions = self.receivers[attempt.decode].cancel(
            registration_id, "aborted", self.now
        )
        if attempt.over:
            if actions != [Report(ReceiveQuiet(registration_id))]:
                raise Violation(f"a late cancel brings {actions}")
            return
        self._perform(attempt.decode, actions)

    def not_needed(
        self, decode: AgentName, transfer_id: TransferId, receivers: int
    ) -> None:
        """A decode engine has everything already."""
        for name in self.senders:
            self._send(decode, name, NotNeeded(transfer_id, receivers))

    def renew(self, decode: AgentName, transfer_id: TransferId) -> None:
        """A decode request still waits for its turn."""
        for name in self.senders:
            self._send(decode, name, Renew((transfer_id,)))

    # ---- the network

    def deliver(self, index: int) -> None:
        """A message arrives."""
        envelope = self.network.pop(index)
        source, target, message = envelope.source, envelope.target, envelope.message
        if target in self.dead:
            return
        self.lost.discard((target, source))
        if target in self.senders:
            self._perform(target, self._to_sender(target, source, message))
        else:
            self._perform(target, self._to_receiver(target, source, message))

    def repeat(self, index: int) -> None:
        """A message will arrive twice."""
        self.network.append(self.network[index])

    def lose(self, index: int) -> None:
        """A message never arrives."""
        del self.network[index]

    # ---- the transport

    def post(self, index: int) -> None:
        """One more piece of a WRITE is posted."""
        write = self.writes[index]
        write.posted.append(write.unposted.pop(0))

    def land(self, index: int, which: int = 0) -> None:
        """A posted piece lands in the decode engine's memory."""
        write = self.writes[index]
        piece = write.posted.pop(which)
        peer = write.action.peer
        if peer in self.dead:
            write.unposted.clear()
            write.failure = write.failure or "disconnected"
        else:
            self._copy_piece(write, piece)
            last = piece == write.total - 1
            self._send(
                write.prefill,
                peer,
                Done(
                    write.action.registration_id,
                    piece,
                    write.total if last else 0,
                    BLOCK,
                    1,
                ),
            )
        self._end_write_if_over(write)

    def break_write(self, index: int) -> None:
        """A WRITE fails: what is posted ends by itself, the rest is not posted."""
        write = self.writes[index]
        write.unposted.clear()
        write.failure = "broken"
        self._end_write_if_over(write)

    def end_read(self, index: int, ok: bool = True) -> None:
        """A READ ends; it may have copied as late as now."""
        read = self.reads.pop(index)
        action = read.action
        failure = None if ok and action.peer not in self.dead else "broken"
        if failure is None:
            for mine, theirs in zip(
                action.local_blocks[0].tolist(),
                action.remote_blocks[0].tolist(),
                strict=True,
            ):
                self._store(
                    read.decode,
                    action.registration_id,
                    action.peer,
                    mine,
                    self.prefill_memory.get((action.peer, theirs)),
                )
        self._perform(
            read.decode,
            self.receivers[read.decode].read_ended(
                action.peer, action.registration_id, TransferSize(), failure, self.now
            ),
        )

    def give_up_on(self, owner: AgentName, peer: AgentName) -> None:
        """``owner`` has not heard of ``peer`` for too long; it may well be alive."""
        self.lost.add((owner, peer))
        if owner in self.receivers:
            self._perform(
                owner, self.receivers[owner].peer_lost(peer, "silent", self.now)
            )
            return
        for write in list(self.writes):
            if write.prefill == owner and write.action.peer == peer:
                write.unposted.clear()
                write.failure = write.failure or "silent"
                self._end_write_if_over(write)
        self._drop_leases(owner, peer)
        self._perform(owner, self.senders[owner].peer_lost(peer, self.now))

    def die(self, name: AgentName) -> None:
        """An engine ends. Messages that it has sent may still arrive."""
        ends = set(self.senders) if name in self.senders else {name}
        self.dead |= ends
        self.writes = [write for write in self.writes if write.prefill not in ends]
        self.reads = [read for read in self.reads if read.decode not in ends]
        for attempt in self.attempts.values():
            if attempt.decode in ends:
                attempt.over = True

    def prove(self, owner: AgentName, peer: AgentName) -> None:
        """``owner`` learns that ``peer``, which is dead, exists no more."""
        assert peer in self.dead
        if owner in self.senders:
            self.give_up_on(owner, peer)
        else:
            self.lost.add((owner, peer))
            self._perform(
                owner, self.receivers[owner].peer_gone(peer, "ended", self.now)
            )

    # ---- time

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def tick(self) -> None:
        """All ranks look at the clock."""
        for name, sender in self._alive(self.senders):
            self._perform(name, sender.tick(self.now))
        for name, receiver in self._alive(self.receivers):
            self._perform(name, receiver.tick(self.now))

    # ---- the end

    def settle(self, proofs: bool = True) -> None:
        """The network is reliable from now on, and time goes on."""
        end = self.now + 2 * (TIMEOUT + LEASE)
        self.lost.clear()
        while self.now < end:
            for transfer_id, prefill in list(self.prefills.items()):
                if not prefill.blocks:
                    self.withdraw(transfer_id)
            for registration_id, attempt in list(self.attempts.items()):
                if attempt.connecting and not attempt.over:
                    self.connect(registration_id)
            if proofs:
                for dead in self.dead:
                    for owner in (*self.senders, *self.receivers):
                        if owner not in self.dead:
                            self.prove(owner, dead)
            self._run_dry()
            self.advance(REPEAT)
            self.tick()

    def check_over(self) -> None:
        """Nothing is left of anything.

        Raises:
            Violation: something is.
        """
        tables: tuple[tuple[AgentName, dict[str, int]], ...] = (
            *((name, table.sizes()) for name, table in self._alive(self.senders)),
            *((name, table.sizes()) for name, table in self._alive(self.receivers)),
        )
        left = {
            f"{name}.{key}": size
            for name, sizes in tables
            for key, size in sizes.items()
            if size
        }
        open_ = [key for key, attempt in self.attempts.items() if not attempt.over]
        if left or open_:
            raise Violation(f"left in tables: {left}; attempts without end: {open_}")
        if not self.dead and len(self.prefill_free) != POOL:
            raise Violation(f"{POOL - len(self.prefill_free)} prefill blocks are lost")
        for name, free in self.decode_free.items():
            if name not in self.dead and len(free) != POOL:
                raise Violation(f"{POOL - len(free)} blocks of {name} are lost")

    # ---- internals

    def _alive(self, tables: dict[AgentName, _Table]) -> list[tuple[AgentName, _Table]]:
        return [(name, t) for name, t in tables.items() if name not in self.dead]

    def _run_dry(self) -> None:
        for _ in range(1000 + 10 * len(self.network)):
            if self.network:
                self.deliver(0)
            elif self.writes:
                if self.writes[0].unposted:
                    self.post(0)
                self.land(0)
            elif self.reads:
                self.end_read(0)
            else:
                return
        raise Violation("messages beget messages without end")

    def _send(self, source: AgentName, target: AgentName, message: Message) -> None:
        if (source, target) not in self.lost:
            self.network.append(Envelope(source, target, message))

    def _to_sender(
        self, name: AgentName, peer: AgentName, message: Message
    ) -> list[Action]:
        sender = self.senders[name]
        match message:
            case Register():
                return sender.register(peer, message, self.now)
            case LeaseRequest():
                return sender.lease_request(peer, message, self.now)
            case Cancel():
                self.leases.pop((name, message.registration_id), None)
                return sender.cancel(
                    peer, message.registration_id, message.transfer_id, self.now
                )
            case NotNeeded():
                return sender.not_needed(
                    message.transfer_id, message.receivers, self.now
                )
            case ReadDone():
                self.leases.pop((name, message.registration_id), None)
                return sender.read_done(peer, message, self.now)
            case Renew():
                sender.renew(message.transfer_ids, self.now)
                return []
            case _:
                raise Violation(f"{message} was sent to a prefill rank")

    def _to_receiver(
        self, name: AgentName, peer: AgentName, message: Message
    ) -> list[Action]:
        receiver = self.receivers[name]
        match message:
            case Accepted():
                return receiver.accepted(peer, message.registration_id)
            case LeaseGranted():
                return receiver.granted(peer, message, self.now)
            case Done():
                return receiver.piece(peer, message, self.now)
            case Finished():
                return receiver.finished(peer, message.registration_id, self.now)
            case Refused():
                return receiver.refused(
                    peer, message.registration_id, message.reason, self.now
                )
            case Cancelled():
                return receiver.cancelled(peer, message.registration_id)
            case ReadConfirmed():
                return receiver.read_confirmed(
                    peer, message.registration_id, message.ok, self.now
                )
            case _:
                raise Violation(f"{message} was sent to a decode rank")

    def _perform(self, owner: AgentName, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._note_answer(owner, action)
                    self._send(owner, action.peer, action.message)
                case StartWrite():
                    self._start_write(owner, action)
                case StartRead():
                    self.reads.append(Read(owner, action))
                case Report():
                    self._take_event(owner, action.event)

    def _note_answer(self, owner: AgentName, action: Send) -> None:
        message = action.message
        match message:
            case LeaseGranted():
                self.leases[owner, message.registration_id] = (
                    message.generation,
                    self.now + message.seconds,
                )
            case ReadConfirmed(ok=True):
                self.attempts[message.registration_id].confirmed.add(owner)
            case _:
                pass

    def _start_write(self, owner: AgentName, action: StartWrite) -> None:
        attempt = self.attempts[action.registration_id]
        if action.peer not in self.dead and attempt.over:
            raise Violation(f"a WRITE starts for {action.registration_id}, which ended")
        total = min(self.pieces, len(action.remote_blocks[0]))
        attempt.pieces[owner] = total
        write = Write(owner, action, list(range(total)), total)
        self.writes.append(write)
        if (owner, action.peer) in self.lost:
            write.unposted.clear()
            write.failure = "silent"
            self._end_write_if_over(write)

    def _copy_piece(self, write: Write, piece: int) -> None:
        action = write.action
        attempt = self.attempts[action.registration_id]
        first = action.want.first_token // BLOCK
        local = action.offer.blocks[0][first:].tolist()
        remote = action.remote_blocks[0].tolist()
        for mine, theirs in list(zip(local, remote, strict=True))[piece :: write.total]:
            self._store(
                action.peer,
                action.registration_id,
                write.prefill,
                theirs,
                self.prefill_memory.get((write.prefill, mine)),
            )
        attempt.landed.add((write.prefill, piece))

    def _store(
        self,
        decode: AgentName,
        registration_id: RegistrationId,
        prefill: AgentName,
        block: int,
        content: Content,
    ) -> None:
        if self.attempts[registration_id].over:
            raise Violation(f"memory of {registration_id} is written after its end")
        self.decode_memory[decode, block, prefill] = content

    def _end_write_if_over(self, write: Write) -> None:
        if write.unposted or write.posted:
            return
        self.writes.remove(write)
        self._perform(
            write.prefill,
            self.senders[write.prefill].written(
                write.action.registration_id, TransferSize(), write.failure, self.now
            ),
        )

    def _drop_leases(self, owner: AgentName, peer: AgentName) -> None:
        for key in list(self.leases):
            if key[0] == owner and self.attempts[key[1]].decode == peer:
                del self.leases[key]

    def _take_event(self, owner: AgentName, event: Event) -> None:
        if isinstance(event, SenderClosed):
            self._closed(owner, event)
            return
        attempt = self.attempts[event.registration_id]
        if attempt.over:
            raise Violation(f"{event} of a registration that has ended")
        match event:
            case Received():
                if attempt.failed:
                    raise Violation(f"{event.registration_id} is received and failed")
                self._check_received(attempt)
                self._give_back(attempt)
            case ReceiveFailed():
                if attempt.failed:
                    raise Violation(f"{event.registration_id} fails twice")
                attempt.failed = True
                if event.quiet:
                    self._give_back(attempt)
            case ReceiveQuiet():
                if not attempt.failed:
                    raise Violation(f"{event.registration_id} is quiet without failure")
                self._give_back(attempt)

    def _check_received(self, attempt: Attempt) -> None:
        first = attempt.request.want.first_token // BLOCK
        for source in self.senders:
            for offset, block in enumerate(attempt.request.blocks[0].tolist()):
                found = self.decode_memory.get((attempt.decode, block, source))
                if found != (attempt.transfer_id, first + offset):
                    raise Violation(
                        f"{attempt.request.registration_id} is received with {found} "
                        f"at position {first + offset} of {source}"
                    )
            if self.mode is Mode.PULL and source not in attempt.confirmed:
                raise Violation(f"a READ from {source} counts without confirmation")
            if self.mode is Mode.PUSH and {
                piece for name, piece in attempt.landed if name == source
            } != set(range(attempt.pieces[source])):
                raise Violation(f"not all pieces of {source} have landed")

    def _give_back(self, attempt: Attempt) -> None:
        attempt.over = True
        registration_id = attempt.request.registration_id
        for write in self.writes:
            if write.action.registration_id == registration_id and (
                write.posted or write.unposted
            ):
                raise Violation(f"{registration_id} ends under a WRITE")
        if any(r.action.registration_id == registration_id for r in self.reads):
            raise Violation(f"{registration_id} ends under a READ")
        for block in attempt.request.blocks[0].tolist():
            for source in self.senders:
                self.decode_memory[attempt.decode, block, source] = None
            # At the front, so that it is used again at once.
            self.decode_free[attempt.decode].insert(0, block)

    def _closed(self, owner: AgentName, event: SenderClosed) -> None:
        prefill = self.prefills.get(event.transfer_id)
        if prefill is None or prefill.generation != event.generation:
            raise Violation(f"{event} of an unknown offer")
        if owner in prefill.closed:
            raise Violation(f"{event.transfer_id} closes twice on {owner}")
        for write in self.writes:
            if (
                write.prefill == owner
                and write.action.offer.generation == event.generation
            ):
                raise Violation(f"{event.transfer_id} closes under a WRITE")
        for (name, registration_id), (generation, end) in self.leases.items():
            if name == owner and generation == event.generation and self.now <= end:
                raise Violation(f"{event} while {registration_id} holds a lease")
        prefill.closed.add(owner)
        if prefill.closed < set(self.senders):
            return
        del self.prefills[event.transfer_id]
        for block in prefill.blocks:
            for name in self.senders:
                self.prefill_memory[name, block] = None
            self.prefill_free.insert(0, block)
