# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode ranks as state machines, on a network that a test controls.

Nothing happens by itself: each method is one thing that may happen next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from v1.kv_connector.unit.nixl.ground_truth import (
    BLOCK,
    LEASE,
    POOL,
    POSITIONS,
    PROMPT,
    REPEAT,
    TIMEOUT,
    Attempt,
    GroundTruth,
    Prefill,
    Read,
    Retracting,
    Violation,
    Write,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Offer,
    ReceiveQuiet,
    Report,
    Send,
    StartRead,
    StartWrite,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    Hint,
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.delivery import (
    ToReceiver,
    ToSender,
    to_receiver,
    to_sender,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
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
    Cancel,
    Done,
    Message,
    NotNeeded,
    ReadDone,
    Renew,
    Want,
)

_Table = TypeVar("_Table", SenderTable, ReceiverTable)


@dataclass(frozen=True)
class Envelope:
    """A message on its way."""

    source: AgentName
    target: AgentName
    message: Message


class Simulation(GroundTruth):
    """One prefill engine of some ranks, and decode engines of one rank each."""

    def __init__(
        self,
        mode: Mode,
        prefill_ranks: int = 1,
        decodes: int = 1,
        pieces: int = 2,
        parts: int = 1,
        sender: type[SenderTable] = SenderTable,
        receiver: type[ReceiverTable] = ReceiverTable,
    ) -> None:
        self.pieces = pieces
        self._sender = sender
        self.senders = {
            AgentName(f"P{rank}"): sender(LEASE, BLOCK) for rank in range(prefill_ranks)
        }
        self.receivers = {
            AgentName(f"D{index}"): receiver(REPEAT) for index in range(decodes)
        }
        super().__init__(mode, tuple(self.senders), tuple(self.receivers), parts)
        self.generation = 0
        self.network: list[Envelope] = []
        self.dead: set[AgentName] = set()
        self.lost: set[tuple[AgentName, AgentName]] = set()
        # What routers were told at the end of a prefill, and tell to decode engines.
        self.told: dict[TransferId, Hint] = {}

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

    def offer(self, transfer_id: TransferId, up_to: int = POSITIONS) -> bool:
        """More of its prompt is computed; whether there were blocks for it."""
        prefill = self.prefills[transfer_id]
        first = len(prefill.blocks)
        count = up_to - first
        if len(self.prefill_free) < count:
            return False
        if not first:
            self.generation += 1
            prefill.generation = self.generation
        blocks = tuple(self.prefill_free[:count])
        del self.prefill_free[:count]
        prefill.blocks += blocks
        if up_to == POSITIONS:
            table = np.asarray(prefill.blocks, dtype=np.int32)
            self.told[transfer_id] = Hint(prefill.generation, (table,))
        offer = Offer(
            transfer_id,
            prefill.generation,
            PROMPT,
            transfer_id.encode(),
            (np.asarray(blocks, dtype=np.int32),),
            first,
            max(0, PROMPT - up_to * BLOCK),
        )
        for name, sender in self._alive(self.senders):
            for position, block in enumerate(blocks, first):
                self.prefill_memory[name, block] = (transfer_id, position)
            for part in range(self.parts):
                group = replace(offer, part=part, parts=self.parts)
                self._perform(name, sender.offer(group, self.now))
        return True

    def offer_chunk(self, transfer_id: TransferId) -> bool:
        """One more block of its prompt is computed."""
        return self.offer(transfer_id, len(self.prefills[transfer_id].blocks) + 1)

    def preempt(self, transfer_id: TransferId) -> None:
        """It loses what is computed of its prompt."""
        prefill = self.prefills[transfer_id]
        generation = prefill.generation
        self.retracting[transfer_id, generation] = Retracting(prefill.blocks)
        prefill.blocks = ()
        for name, sender in self._alive(self.senders):
            self._perform(name, sender.retract(transfer_id, generation))

    def withdraw(self, transfer_id: TransferId) -> None:
        """The prefill request is aborted."""
        prefill = self.prefills[transfer_id]
        prefill.withdrawn = True
        if not prefill.blocks:
            del self.prefills[transfer_id]
        for name, sender in self._alive(self.senders):
            for key, (generation, _) in list(self.leases.items()):
                if key[0] == name and generation == prefill.generation:
                    del self.leases[key]
            self._perform(name, sender.withdraw(transfer_id, "aborted", self.now))

    def restart(self) -> None:
        """The prefill engine is another one, which knows of nothing."""
        for name in self.senders:
            self.senders[name] = self._sender(LEASE, BLOCK)
        self.network = [e for e in self.network if e.target not in self.senders]
        self.prefill_memory.clear()
        self.prefill_free = list(range(POOL))
        self.prefills.clear()
        self.leases.clear()

    def own_moves(self) -> Iterator[tuple[str, str, tuple[object, ...]]]:
        """What only a kind of simulation can do next: a label, a method, arguments."""
        return iter(())

    # ---- the decode engines' schedulers

    def startable(self, transfer_id: TransferId) -> bool:
        """Whether a decode engine can know of it."""
        return True

    def start(
        self,
        decode: AgentName,
        registration_id: RegistrationId,
        transfer_id: TransferId,
        first_block: int = 0,
        called: TransferId | None = None,
        hint: Hint | None = None,
    ) -> bool:
        """A decode request is given blocks; whether there were any.

        ``hint`` is where the whole prompt is said to lie.
        """
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
            self.mode,
            hint and replace(hint, blocks=(hint.blocks[0][first_block:],)),
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

    def hint(self, transfer_id: TransferId, kind: str) -> Hint | None:
        """What a client says of it: the truth as it once was, a lie, or a guess.

        Block ids can be guessed, and so before anything is in the blocks; a
        generation cannot.
        """
        told = self.told.get(transfer_id)
        match kind:
            case "told":
                return told
            case "lie" if told is not None:
                return replace(told, blocks=((told.blocks[0] + 1) % POOL,))
            case "guess":
                blocks = self.prefill_free[:POSITIONS]
                if len(blocks) == POSITIONS:
                    return Hint(0, (np.asarray(blocks, dtype=np.int32),))
        return None

    # ---- the network

    def deliver(self, index: int) -> None:
        """A message arrives."""
        envelope = self.network.pop(index)
        source, target, message = envelope.source, envelope.target, envelope.message
        if target in self.dead:
            return
        self.lost.discard((target, source))
        if target in self.senders:
            if isinstance(message, Cancel | ReadDone):
                self.leases.pop((target, message.registration_id), None)
            sender = self.senders[target]
            assert isinstance(message, ToSender)
            self._perform(target, to_sender(sender, source, message, self.now, 1))
        else:
            receiver = self.receivers[target]
            assert isinstance(message, ToReceiver)
            self._perform(target, to_receiver(receiver, source, message, self.now))

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
            self.copy_piece(write, piece)
            action = write.action
            self._send(
                write.prefill,
                peer,
                Done(
                    action.registration_id,
                    action.chunk,
                    action.last,
                    piece,
                    write.total,
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
                self.store(
                    read.decode,
                    action.registration_id,
                    action.peer,
                    mine,
                    self.prefill_memory.get((action.peer, theirs)),
                    range(self.parts),
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
        self.drop_leases(owner, peer)
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
                if prefill.computing:
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
        if left or open_ or (self.retracting and not self.dead):
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

    def _perform(self, owner: AgentName, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.note_answer(owner, action)
                    self._send(owner, action.peer, action.message)
                case StartWrite():
                    self._start_write(owner, action)
                case StartRead():
                    self.reads.append(Read(owner, action))
                case Report():
                    self.take_event(owner, action.event)

    def _start_write(self, owner: AgentName, action: StartWrite) -> None:
        attempt = self.attempts[action.registration_id]
        if action.peer not in self.dead and attempt.over:
            raise Violation(f"a WRITE starts for {action.registration_id}, which ended")
        total = min(self.pieces, len(action.remote_blocks[0]))
        attempt.pieces |= {(owner, action.chunk, piece) for piece in range(total)}
        generation = self.prefills[attempt.transfer_id].generation
        write = Write(owner, action, generation, list(range(total)), total)
        self.writes.append(write)
        if (owner, action.peer) in self.lost:
            write.unposted.clear()
            write.failure = "silent"
            self._end_write_if_over(write)

    def _end_write_if_over(self, write: Write) -> None:
        if write.unposted or write.posted:
            return
        self.writes.remove(write)
        self._perform(
            write.prefill,
            self.senders[write.prefill].written(
                write.action.peer,
                write.action.registration_id,
                write.action.chunk,
                TransferSize(),
                write.failure,
                self.now,
            ),
        )
