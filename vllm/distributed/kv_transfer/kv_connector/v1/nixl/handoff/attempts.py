# SPDX-License-Identifier: Apache-2.0
"""What the receiving side keeps of an attempt and of each rank that it draws on."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ..ids import AgentName, Mode, RegistrationId, TransferId
from ..timeline import Stage, Stamps
from ..wire.blocks import BlockArray, blocks_digest
from ..wire.notifications import Done, LeaseGranted, ReadDone, Want
from .actions import TransferSize

MAX_PIECES = 1 << 20
"""Pieces of one rank's WRITEs that are counted for an attempt."""


class State(Enum):
    """How far an attempt is; :mod:`.receiver` has the ways from one to another."""

    CONNECTING = auto()
    REQUESTED = auto()
    ACCEPTED = auto()
    READING = auto()
    CONFIRMING = auto()
    TELLING = auto()
    QUIESCING = auto()


@dataclass
class Source:
    """What one writing or readable rank has told so far.

    ``pieces`` holds what has landed of each chunk, ``complete`` the chunks that have
    landed whole; ``remote`` the blocks that are read or have been, if any, which are
    of ``generation``. It was read at ``read_at`` and has ``confirmed`` it.
    """

    pieces: dict[int, set[int]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    last_chunk: int | None = None
    num_pieces: int = 0
    finished: bool = False
    granted: LeaseGranted | None = None
    remote: tuple[BlockArray, ...] | None = None
    generation: int = 0
    read_at: float | None = None
    confirmed: bool = False
    quiet: bool = False

    @property
    def read(self) -> bool:
        """Whether it has been read whole."""
        return self.read_at is not None

    @property
    def num_chunks(self) -> int:
        """Chunks that have come; what is read is one."""
        return len(self.complete) + self.read

    @property
    def done(self) -> bool:
        """Whether all that it has to give has come."""
        if self.last_chunk is None:
            return self.finished
        return self.finished or len(self.complete) > self.last_chunk

    def is_read_as(self, generation: int, blocks: tuple[BlockArray, ...]) -> bool:
        """Whether these are the blocks that are read."""
        return (
            self.remote is not None
            and self.generation == generation
            and blocks_digest(self.remote) == blocks_digest(blocks)
        )

    def landed(self, msg: Done) -> bool:
        """A piece has; whether that is news."""
        if self.num_pieces >= MAX_PIECES:
            return False
        pieces = self.pieces.setdefault(msg.chunk, set())
        if msg.seq in pieces:
            return False
        pieces.add(msg.seq)
        self.num_pieces += 1
        if len(pieces) == msg.total:
            self.complete.add(msg.chunk)
        if msg.last:
            self.last_chunk = msg.chunk
        return True


@dataclass(frozen=True)
class Hint:
    """Where wanted KV is said to lie, which its holder has yet to confirm.

    ``blocks`` are aligned with those of the :class:`ReceiveRequest`.
    """

    generation: int
    blocks: tuple[BlockArray, ...]


@dataclass(frozen=True)
class ReceiveRequest:
    """One attempt: which tokens, into which blocks, within how long (seconds).

    With ``mode`` push the other side WRITEs, with pull this one READs. ``blocks``
    holds, per KV cache group, the block ids for the positions from
    ``want.first_token`` on. With a ``hint`` the READ begins while its lease is asked
    for.
    """

    registration_id: RegistrationId
    transfer_id: TransferId
    want: Want
    blocks: tuple[BlockArray, ...]
    timeout: float
    mode: Mode
    hint: Hint | None = None


@dataclass
class Attempt:
    """What is known of one attempt."""

    request: ReceiveRequest
    started_at: float
    deadline: float
    state: State = State.CONNECTING
    sources: dict[AgentName, Source] = field(default_factory=dict)
    next_send: float = 0.0
    asked_at: float = 0.0
    open_reads: int = 0
    size: TransferSize = field(default_factory=TransferSize)
    stamps: Stamps = field(default_factory=Stamps)

    @property
    def reads(self) -> bool:
        """Whether this rank READs, and is not written to."""
        return self.request.mode is Mode.PULL

    def is_leased(self, source: Source) -> bool:
        """Whether ``source`` was read within the lease that it has granted.

        The lease began after it was asked for, on whatever clock.
        """
        return (
            source.granted is not None
            and source.read_at is not None
            and source.read_at <= self.asked_at + source.granted.seconds
        )

    def read_done(self, source: Source, ok: bool) -> ReadDone:
        """What a lender is told when this rank's READ has ended."""
        return ReadDone(
            self.request.registration_id,
            self.request.transfer_id,
            source.generation,
            ok,
            self.request.want,
            blocks_digest(source.remote or ()),
        )

    def landed(self, msg: Done, now: float, is_end: bool) -> None:
        """A piece has, for the first time; ``is_end``: of its last chunk too."""
        self.size += TransferSize(msg.bytes, msg.descriptors)
        self.stamps.mark(Stage.ANSWERED, now)
        self.stamps.mark(Stage.FIRST_NOTIFICATION, now)
        if is_end:
            self.stamps.mark(Stage.PREFILL_ENDED, now)
