# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode ranks as state machines, on a network that a test controls.

Nothing happens by itself: each method is one thing that may happen next.
"""

from collections.abc import Iterable, Iterator, Sequence
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
    Part,
    Prefill,
    Ranks,
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
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
    """A prefill engine and decode engines, of one or more ranks each.

    Args:
        prefill_ranks: ranks of the prefill engine.
        decodes: decode engines.
        decode_ranks: ranks of each of them.
        heads: KV heads of the model, which decide who asks whom.

    Attributes:
        disturbed: whether anything has happened for which KV may fail to come.
    """

    def __init__(
        self,
        mode: Mode,
        prefill_ranks: int = 1,
        decodes: int = 1,
        pieces: int = 2,
        parts: int = 1,
        sender: type[SenderTable] = SenderTable,
        receiver: type[ReceiverTable] = ReceiverTable,
        decode_ranks: Sequence[int] = (),
        heads: int = 2,
    ) -> None:
        layout = Ranks(prefill_ranks, decode_ranks or (1,) * decodes, heads)
        super().__init__(mode, layout, parts)
        self.pieces = pieces
        self._sender = sender
        self.senders = {name: sender(LEASE, BLOCK) for name in layout.prefill}
        self.receivers = {name: receiver(REPEAT) for name in layout.sources}
        self.announced: dict[TransferId, list[int | None]] = {}
        self.disturbed = False
        self.generation = 0
        self.restarts = 0
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
        self.announced.setdefault(transfer_id, []).append(receivers)
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
        self.disturbed = True
        if not prefill.blocks:
            del self.prefills[transfer_id]
        for name, sender in self._alive(self.senders):
            self._perform(name, sender.withdraw(transfer_id, "aborted", self.now))

    def restart(self) -> None:
        """The prefill engine is another one, which knows of nothing."""
        self.disturbed = True
        self.restarts += 1
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
        ranks = self.layout.decode[decode]
        if self.dead.intersection(ranks) or len(free) < count:
            return False
        blocks = free[:count]
        del free[:count]
        first = first_block * BLOCK
        self.disturbed |= hint is not None and hint is not self.told.get(transfer_id)
        request = ReceiveRequest(
            registration_id,
            called or transfer_id,
            Want(PROMPT, first, PROMPT - first, transfer_id.encode()),
            (np.asarray(blocks, dtype=np.int32),),
            TIMEOUT,
            self.mode,
            hint and replace(hint, blocks=(hint.blocks[0][first_block:],)),
        )
        parts = {name: Part() for name in ranks}
        self.attempts[registration_id] = Attempt(decode, transfer_id, request, parts)
        for name in ranks:
            self.receivers[name].receive(request, self.now)
        return True

    def connect(self, registration_id: RegistrationId) -> None:
        """The ranks of the attempt's engine connect to the prefill engine."""
        for rank, part in self.attempts[registration_id].ranks.items():
            if part.connecting:
                self.connect_rank(registration_id, rank)

    def connect_rank(self, registration_id: RegistrationId, rank: AgentName) -> None:
        """A rank of the attempt's engine connects, if the prefill engine lives."""
        attempt = self.attempts[registration_id]
        part = attempt.ranks[rank]
        if self.dead & set(self.senders) and not part.over:
            self.unreachable(registration_id, rank)
            return
        part.connecting = False
        part.connected_to = self.restarts
        known = (*self.layout.sources[rank], *self.layout.idle[rank])
        for name in known:
            self.lost.discard((rank, name))
        untold = known if part.over else self.layout.idle[rank]
        self._perform(
            rank,
            self.receivers[rank].connected(
                registration_id, self.layout.sources[rank], self.now
            ),
        )
        self.tell_not_needed(rank, untold, attempt.request.transfer_id, 1)

    def unreachable(self, registration_id: RegistrationId, rank: AgentName) -> None:
        """A rank cannot connect."""
        self.disturbed = True
        self.attempts[registration_id].ranks[rank].connecting = False
        self._perform(
            rank,
            self.receivers[rank].unreachable(registration_id, "no route", self.now),
        )

    def cancel(self, registration_id: RegistrationId) -> None:
        """The decode request is aborted; its ranks hear of it at once."""
        attempt = self.attempts[registration_id]
        attempt.cancelled = True
        self.disturbed = True
        for rank in attempt.ranks:
            self._cancel(registration_id, rank)

    def give_up(self, registration_id: RegistrationId, rank: AgentName) -> None:
        """A rank hears that another has failed."""
        self.attempts[registration_id].to_cancel.remove(rank)
        self._cancel(registration_id, rank)

    def not_needed(
        self, decode: AgentName, transfer_id: TransferId, receivers: int
    ) -> None:
        """A decode engine has everything already."""
        self.disturbed = True
        for rank in self.layout.decode[decode]:
            names = (*self.layout.sources[rank], *self.layout.idle[rank])
            self.tell_not_needed(rank, names, transfer_id, receivers)

    def tell_not_needed(
        self,
        rank: AgentName,
        names: Iterable[AgentName],
        transfer_id: TransferId,
        receivers: int,
    ) -> None:
        """A decode rank says that it does not ask."""
        for name in names:
            self._send(rank, name, NotNeeded(transfer_id, receivers))

    def renew(self, decode: AgentName, transfer_id: TransferId) -> None:
        """A decode request still waits for its turn."""
        for rank in self.layout.decode[decode]:
            for name in (*self.layout.sources[rank], *self.layout.idle[rank]):
                self._send(rank, name, Renew((transfer_id,)))

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
                self.leases.pop((target, source, message.registration_id), None)
            sender = self.senders[target]
            assert isinstance(message, ToSender)
            readers = self.layout.readers[target, source]
            self._perform(target, to_sender(sender, source, message, self.now, readers))
        else:
            receiver = self.receivers[target]
            assert isinstance(message, ToReceiver)
            self._perform(target, to_receiver(receiver, source, message, self.now))

    def repeat(self, index: int) -> None:
        """A message will arrive twice."""
        self.network.append(self.network[index])
        self.disturbed |= isinstance(self.network[index].message, NotNeeded)

    def lose(self, index: int) -> None:
        """A message never arrives."""
        self.disturbed = True
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
        self.disturbed = True
        write = self.writes[index]
        write.unposted.clear()
        write.failure = "broken"
        self._end_write_if_over(write)

    def end_read(self, index: int, ok: bool = True) -> None:
        """A READ ends; it may have copied as late as now.

        The memory of an engine that is no more cannot be read.
        """
        self.disturbed |= not ok
        read = self.reads.pop(index)
        action = read.action
        part = self.attempts[action.registration_id].ranks[read.decode]
        there = action.peer not in self.dead and part.connected_to == self.restarts
        failure = None if ok and there else "broken"
        if failure is None:
            part.read_at[action.peer] = self.now
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
        self.disturbed = True
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
        if peer in self.dead:
            self.drop_leases(owner, peer)
            self._perform(owner, self.senders[owner].peer_gone(peer, self.now))
        else:
            self._perform(owner, self.senders[owner].peer_lost(peer, self.now))

    def die(self, name: AgentName) -> None:
        """An engine ends. Messages that it has sent may still arrive."""
        self.disturbed = True
        ends = set(
            self.senders
            if name in self.senders
            else self.layout.decode[self.layout.engine_of(name)]
        )
        self.dead |= ends
        self.writes = [write for write in self.writes if write.prefill not in ends]
        self.reads = [read for read in self.reads if read.decode not in ends]
        for attempt in self.attempts.values():
            for rank in ends.intersection(attempt.ranks):
                attempt.ranks[rank].over = True
                attempt.ranks[rank].connecting = False
                attempt.to_cancel = []

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
        """Time passes, and may be what something waited for in vain."""
        self.disturbed = True
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
        if not self.disturbed:
            self.serve_all()
        end = self.now + 2 * (TIMEOUT + LEASE)
        self.lost.clear()
        while self.now < end:
            for transfer_id, prefill in list(self.prefills.items()):
                if prefill.computing:
                    self.withdraw(transfer_id)
            for registration_id, attempt in list(self.attempts.items()):
                if attempt.connecting:
                    self.connect(registration_id)
            if proofs:
                for dead in self.dead:
                    for owner in (*self.senders, *self.receivers):
                        if owner not in self.dead:
                            self.prove(owner, dead)
            self._run_dry()
            self.advance(REPEAT)
            self.tick()

    def serve_all(self) -> None:
        """Go on to where all that was asked for has come; nothing hinders it.

        Raises:
            Violation: it does not come, or is not let go of.
        """
        for transfer_id, prefill in list(self.prefills.items()):
            if prefill.computing:
                self.offer(transfer_id)
        for registration_id, attempt in list(self.attempts.items()):
            if attempt.connecting:
                self.connect(registration_id)
        self._run_dry()
        for transfer_id, announced in self.announced.items():
            prefill_is_open = transfer_id in self.prefills
            attempts = [
                attempt
                for attempt in self.attempts.values()
                if attempt.transfer_id == transfer_id
            ]
            wanted = announced[0] or 1
            if len(announced) > 1 or len(attempts) > wanted:
                continue
            if prefill_is_open and self.prefills[transfer_id].computing:
                continue
            late = [a.request.registration_id for a in attempts if not a.received]
            if late:
                raise Violation(f"{late} do not come, though nothing hinders it")
            if prefill_is_open and len(attempts) == wanted:
                raise Violation(f"{transfer_id} is served, and is not let go of")

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
            alive = not self.dead.intersection(self.layout.decode[name])
            if alive and len(free) != POOL:
                raise Violation(f"{POOL - len(free)} blocks of {name} are lost")

    # ---- internals

    def _alive(self, tables: dict[AgentName, _Table]) -> list[tuple[AgentName, _Table]]:
        return [(name, t) for name, t in tables.items() if name not in self.dead]

    def _cancel(self, registration_id: RegistrationId, rank: AgentName) -> None:
        part = self.attempts[registration_id].ranks[rank]
        actions = self.receivers[rank].cancel(registration_id, "aborted", self.now)
        if part.over:
            if actions != [Report(ReceiveQuiet(registration_id))]:
                raise Violation(f"a late cancel brings {actions}")
            return
        self._perform(rank, actions)

    def _run_dry(self) -> None:
        for _ in range(1000 + 10 * len(self.network)):
            for registration_id, attempt in self.attempts.items():
                for rank in attempt.to_cancel[:]:
                    self.give_up(registration_id, rank)
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
        part = attempt.ranks[action.peer]
        if action.peer not in self.dead and part.over:
            raise Violation(f"a WRITE starts for {action.registration_id}, which ended")
        total = min(self.pieces, len(action.remote_blocks[0]))
        part.pieces |= {(owner, action.chunk, piece) for piece in range(total)}
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
