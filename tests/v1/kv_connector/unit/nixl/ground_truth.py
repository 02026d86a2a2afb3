# SPDX-License-Identifier: Apache-2.0
"""What is true of a simulated hand-off, whatever its tables believe.

It knows what each block of memory holds and which transfers are under way, so that
a table which gives memory back too early is caught by what is then in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Retracted,
    Send,
    SenderClosed,
    StartRead,
    StartWrite,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.topology import (
    RankShape,
    idle,
    readers,
    sources,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    LeaseGranted,
    ReadConfirmed,
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


class Violation(AssertionError):
    """Something happened that must not happen."""


@dataclass
class Write:
    """A WRITE under way, in pieces that may land at any time once posted."""

    prefill: AgentName
    action: StartWrite
    generation: int
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
class Part:
    """What is true of one rank's part of a registration.

    ``connected_to`` counts the prefill engines that were before.
    """

    connecting: bool = True
    received: bool = False
    failed: bool = False
    over: bool = False
    landed: set[tuple[AgentName, int, int]] = field(default_factory=set)
    pieces: set[tuple[AgentName, int, int]] = field(default_factory=set)
    confirmed: set[AgentName] = field(default_factory=set)
    read_at: dict[AgentName, float] = field(default_factory=dict)
    connected_to: int = 0


@dataclass
class Attempt:
    """What is true of one registration, of an engine and of each of its ranks.

    ``to_cancel`` are ranks that the engine's scheduler is about to tell of its end.
    """

    decode: AgentName
    transfer_id: TransferId
    request: ReceiveRequest
    ranks: dict[AgentName, Part]
    cancelled: bool = False
    failed: bool = False
    given_back: bool = False
    to_cancel: list[AgentName] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no rank has anything to do with it any more."""
        return all(part.over for part in self.ranks.values())

    @property
    def connecting(self) -> bool:
        """Whether a rank has not connected yet."""
        return any(part.connecting for part in self.ranks.values())

    @property
    def received(self) -> bool:
        """Whether it has come, for all ranks."""
        return all(part.received for part in self.ranks.values())


@dataclass
class Prefill:
    """A prefill request, as the scheduler side of its engine knows it."""

    generation: int = 0
    blocks: tuple[int, ...] = ()
    withdrawn: bool = False
    closed: set[AgentName] = field(default_factory=set)

    @property
    def computing(self) -> bool:
        """Whether more of its prompt may be computed."""
        return len(self.blocks) < POSITIONS and not self.withdrawn


@dataclass
class Retracting:
    """Blocks of a preempted prefill request."""

    blocks: tuple[int, ...]
    quiet: set[AgentName] = field(default_factory=set)


class Ranks:
    """The ranks of a prefill engine and of decode engines, and who asks whom.

    Args:
        prefill: how many ranks the prefill engine has.
        decode: how many each decode engine has.
        heads: KV heads of the model.
    """

    def __init__(self, prefill: int, decode: Sequence[int], heads: int) -> None:
        self.prefill = tuple(AgentName(f"P{rank}") for rank in range(prefill))
        self.decode: dict[AgentName, tuple[AgentName, ...]] = {}
        self.sources: dict[AgentName, tuple[AgentName, ...]] = {}
        self.readers: dict[tuple[AgentName, AgentName], int] = {}
        # Told by each rank to ranks of which its engine needs nothing.
        self.idle: dict[AgentName, tuple[AgentName, ...]] = {}
        for index, size in enumerate(decode):
            engine = AgentName(f"D{index}")
            names = tuple(
                engine if size == 1 else AgentName(f"{engine}.{rank}")
                for rank in range(size)
            )
            self.decode[engine] = names
            for rank, name in enumerate(names):
                found = sources(RankShape(rank, size), prefill, {heads})
                self.sources[name] = tuple(self.prefill[source] for source in found)
                unasked = () if rank else idle(size, prefill, {heads})
                self.idle[name] = tuple(self.prefill[source] for source in unasked)
            for rank, source in enumerate(self.prefill):
                count = len(readers(RankShape(rank, prefill), size, {heads}))
                self.readers.update({(source, name): count for name in names})

    def engine_of(self, rank: AgentName) -> AgentName:
        """The decode engine that a decode rank belongs to."""
        return next(name for name, ranks in self.decode.items() if rank in ranks)


class GroundTruth:
    """The memory of all ranks, and what is under way."""

    def __init__(
        self,
        mode: Mode,
        layout: Ranks,
        parts: int = 1,
    ) -> None:
        self.mode = mode
        self.parts = parts
        self.now = 0.0
        self.layout = layout
        self.sources = layout.prefill
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.attempts: dict[RegistrationId, Attempt] = {}
        self.prefills: dict[TransferId, Prefill] = {}
        self.retracting: dict[tuple[TransferId, int], Retracting] = {}
        # By lender and reader.
        self.leases: dict[
            tuple[AgentName, AgentName, RegistrationId], tuple[int, float]
        ] = {}
        # Of all that were ever granted, when they end.
        self.lease_ends: dict[tuple[AgentName, AgentName, RegistrationId], float] = {}
        self.prefill_free = list(range(POOL))
        self.decode_free = {name: list(range(POOL)) for name in layout.decode}
        self.prefill_memory: dict[tuple[AgentName, int], Content] = {}
        # By rank, block, and the rank and the group of layers that it came from.
        self.decode_memory: dict[tuple[AgentName, int, AgentName, int], Content] = {}

    def note_answer(self, owner: AgentName, action: Send) -> None:
        """A prefill rank has promised something."""
        message = action.message
        match message:
            case LeaseGranted():
                key, end = (
                    (owner, action.peer, message.registration_id),
                    self.now + message.seconds,
                )
                self.leases[key] = message.generation, end
                self.lease_ends[key] = end
            case ReadConfirmed():
                self.leases.pop((owner, action.peer, message.registration_id), None)
                if message.ok:
                    attempt = self.attempts[message.registration_id]
                    attempt.ranks[action.peer].confirmed.add(owner)
            case _:
                pass

    def drop_leases(self, owner: AgentName, peer: AgentName) -> None:
        """A prefill rank expects no more of a peer."""
        for key in list(self.leases):
            if key[:2] == (owner, peer):
                del self.leases[key]

    def copy_piece(self, write: Write, piece: int) -> None:
        """A piece lands."""
        action = write.action
        part = self.attempts[action.registration_id].ranks[action.peer]
        local = action.local_blocks[0].tolist()
        remote = action.remote_blocks[0].tolist()
        for mine, theirs in list(zip(local, remote, strict=True))[piece :: write.total]:
            self.store(
                action.peer,
                action.registration_id,
                write.prefill,
                theirs,
                self.prefill_memory.get((write.prefill, mine)),
                [action.part],
            )
        part.landed.add((write.prefill, action.chunk, piece))

    def store(
        self,
        decode: AgentName,
        registration_id: RegistrationId,
        prefill: AgentName,
        block: int,
        content: Content,
        parts: Iterable[int],
    ) -> None:
        """Groups of layers of a decode rank's block are written."""
        if self.attempts[registration_id].ranks[decode].over:
            raise Violation(f"memory of {registration_id} is written after its end")
        for part in parts:
            self.decode_memory[decode, block, prefill, part] = content

    def take_event(self, owner: AgentName, event: Event) -> None:
        """A table reports what it believes; that must be true.

        Raises:
            Violation: it is not.
        """
        if isinstance(event, SenderClosed):
            self._closed(owner, event)
            return
        if isinstance(event, Retracted):
            self._retracted(owner, event)
            return
        attempt = self.attempts[event.registration_id]
        part = attempt.ranks[owner]
        if part.over:
            raise Violation(f"{event} of a registration that has ended")
        match event:
            case Received():
                if part.failed:
                    raise Violation(f"{event.registration_id} is received and failed")
                part.received = True
                self._check_received(attempt, owner)
                self._end(attempt, owner)
            case ReceiveFailed():
                if part.failed:
                    raise Violation(f"{event.registration_id} fails twice")
                part.failed = True
                if not attempt.failed and not attempt.cancelled:
                    # The scheduler gives up for all ranks.
                    attempt.to_cancel = list(attempt.ranks)
                attempt.failed = True
                if event.quiet:
                    self._end(attempt, owner)
            case ReceiveQuiet():
                if not part.failed:
                    raise Violation(f"{event.registration_id} is quiet without failure")
                self._end(attempt, owner)

    def _check_received(self, attempt: Attempt, rank: AgentName) -> None:
        first = attempt.request.want.first_token // BLOCK
        part_of_rank = attempt.ranks[rank]
        for source, part in product(self.layout.sources[rank], range(self.parts)):
            for offset, block in enumerate(attempt.request.blocks[0].tolist()):
                found = self.decode_memory.get((rank, block, source, part))
                if found != (attempt.transfer_id, first + offset):
                    raise Violation(
                        f"{attempt.request.registration_id} is received with {found} "
                        f"at position {first + offset} of {source}"
                    )
            if self.mode is Mode.PULL and source not in part_of_rank.confirmed:
                key = source, rank, attempt.request.registration_id
                end = self.lease_ends.get(key, float("-inf"))
                if part_of_rank.read_at.get(source, float("inf")) > end:
                    raise Violation(
                        f"a READ from {source} counts without lease or confirmation"
                    )
        if self.mode is Mode.PUSH and part_of_rank.landed != part_of_rank.pieces:
            raise Violation(
                f"only {part_of_rank.landed} of {part_of_rank.pieces} have landed"
            )

    def _end(self, attempt: Attempt, rank: AgentName) -> None:
        """A rank says that nothing writes there; the last gives the blocks back."""
        attempt.ranks[rank].over = True
        registration_id = attempt.request.registration_id
        for write in self.writes:
            action = write.action
            if (action.registration_id, action.peer) == (registration_id, rank) and (
                write.posted or write.unposted
            ):
                raise Violation(f"{registration_id} ends under a WRITE")
        if any(
            (read.action.registration_id, read.decode) == (registration_id, rank)
            for read in self.reads
        ):
            raise Violation(f"{registration_id} ends under a READ")
        if not attempt.over:
            return
        if attempt.received:
            for each in attempt.ranks:
                self._check_received(attempt, each)
        attempt.given_back = True
        for block in attempt.request.blocks[0].tolist():
            for each in attempt.ranks:
                for source, part in product(self.sources, range(self.parts)):
                    self.decode_memory[each, block, source, part] = None
            # At the front, so that it is used again at once.
            self.decode_free[attempt.decode].insert(0, block)

    def _closed(self, owner: AgentName, event: SenderClosed) -> None:
        prefill = self.prefills.get(event.transfer_id)
        if prefill is None or prefill.generation != event.generation:
            raise Violation(f"{event} of an unknown offer")
        if owner in prefill.closed:
            raise Violation(f"{event.transfer_id} closes twice on {owner}")
        self._check_unread(owner, event)
        for (name, _, registration_id), (generation, end) in self.leases.items():
            if name == owner and generation == event.generation and self.now <= end:
                raise Violation(f"{event} while {registration_id} holds a lease")
        prefill.closed.add(owner)
        if prefill.closed < set(self.sources):
            return
        del self.prefills[event.transfer_id]
        self._free_prefilled(prefill.blocks)

    def _retracted(self, owner: AgentName, event: Retracted) -> None:
        key = event.transfer_id, event.generation
        retracting = self.retracting.get(key)
        if retracting is None or owner in retracting.quiet:
            raise Violation(f"{event} of {owner} is about nothing")
        self._check_unread(owner, event)
        retracting.quiet.add(owner)
        if retracting.quiet < set(self.sources):
            return
        del self.retracting[key]
        self._free_prefilled(retracting.blocks)

    def _check_unread(self, owner: AgentName, event: SenderClosed | Retracted) -> None:
        for write in self.writes:
            if write.prefill == owner and write.generation == event.generation:
                raise Violation(f"{event.transfer_id} closes under a WRITE")

    def _free_prefilled(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            for name in self.sources:
                self.prefill_memory[name, block] = None
            self.prefill_free.insert(0, block)
