# SPDX-License-Identifier: Apache-2.0
"""What the prefill side keeps of a hand-off and of each claim on it."""

from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import TypeAlias

from ..ids import AgentName, RegistrationId, TransferId
from ..timeline import Stage as Reached
from ..timeline import Stamps
from ..wire.blocks import BlockArray, blocks_digest, pack_blocks
from ..wire.notifications import (
    Cancelled,
    Finished,
    LeaseGranted,
    ReadDone,
    Refused,
    Want,
)
from .actions import CloseReason, Offer, SenderClosed, StartWrite, TransferSize
from .computed import Computed

ClaimKey: TypeAlias = tuple[AgentName, RegistrationId]
"""Who claims, and for which attempt: all ranks of an engine use its scheduler's id."""

Answer: TypeAlias = Finished | Refused | Cancelled
"""What a receiver's rank is told at the end."""


def share(receivers: int, readers: int) -> Fraction:
    """What the word of one rank for ``receivers`` counts, in receivers.

    ``readers`` ranks of its engine speak to this one; none where one of them speaks
    for them all, since they need nothing from here.
    """
    return Fraction(receivers, max(1, readers))


class Stage(Enum):
    """How far a hand-off is."""

    AWAITED = auto()
    EXPECTED = auto()
    OFFERED = auto()


class ClaimState(Enum):
    """How far a receiver's claim is.

    One that is written chunk by chunk is WAITING whenever no WRITE is under way.
    """

    WAITING = auto()
    WRITING = auto()
    LEASED = auto()


@dataclass
class Claim:
    """The wish of a receiver's rank for a hand-off's KV.

    Attributes:
        share: what it counts, in receivers; see :func:`share`.
        writes: the generation that each WRITE under way reads from, by chunk number.
        chunks: WRITEs begun so far, which is the number of the next chunk.
        written_to: per part of the layers, tokens from the start of the prompt that are
            written or being so; empty until the first WRITE.
        failure: why a WRITE failed.
    """

    registration_id: RegistrationId
    peer: AgentName
    want: Want
    blocks: tuple[BlockArray, ...] | None
    claimed_at: float
    share: Fraction = Fraction(1)
    state: ClaimState = ClaimState.WAITING
    leased_at: float = 0.0
    lease_end: float = 0.0
    # Set when the receiver or its engine is gone while a WRITE is posted: the
    # outcome of the WRITE is then nobody's concern but its end still is.
    abandoned: bool = False
    cancel_requested: bool = False
    writes: dict[int, int] = field(default_factory=dict)
    chunks: int = 0
    written_to: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def key(self) -> ClaimKey:
        """What it is known by."""
        return self.peer, self.registration_id

    @property
    def is_written(self) -> bool:
        """Whether WRITEs of all that is wanted have begun."""
        return bool(self.written_to) and min(self.written_to) >= self.want.end

    @property
    def num_blocks(self) -> int:
        """Block ids that it holds."""
        return sum(len(group) for group in self.blocks or ())


@dataclass
class Handoff:
    """One prompt's KV and those who want it.

    Attributes:
        computed: what there is to move, as far as it goes.
        retracted: the latest generation that was taken back.
        retracting: generations that were, while a WRITE reads from their blocks.
        ended: receivers that have, the ranks of each counted by their share.
        tokens: what they got in all, counted likewise.
    """

    transfer_id: TransferId
    stage: Stage
    deadline: float
    receivers: int | None = None
    computed: Computed | None = None
    offered_at: float = 0.0
    ended: Fraction = Fraction(0)
    released: bool = False
    lapsed: bool = False
    withdrawn: str | None = None
    claims: dict[ClaimKey, Claim] = field(default_factory=dict)
    tokens: Fraction = Fraction(0)
    size: TransferSize = field(default_factory=TransferSize)
    aliases: tuple[TransferId, ...] = ()
    retracted: int = 0
    retracting: set[int] = field(default_factory=set)
    stamps: Stamps = field(default_factory=Stamps)

    def moved(self, began: float, ended: float) -> None:
        """A chunk was, for some receiver, between these moments."""
        self.stamps.chunks += 1
        self.stamps.mark(Reached.FIRST_POSTED, began)
        self.stamps.mark(Reached.LAST_POSTED, began)
        self.stamps.mark(Reached.WRITTEN, ended)

    def provided(self, claim: Claim) -> None:
        """A claim has got all that it wants."""
        self.tokens += claim.want.num_tokens * claim.share

    @property
    def offer(self) -> Offer | None:
        """The block table of what is computed."""
        return None if self.computed is None else self.computed.offer

    @property
    def result(self) -> CloseReason:
        """What has become of it, once all its receivers have ended."""
        if self.tokens:
            return CloseReason.SERVED
        return CloseReason.EXPIRED if self.lapsed else CloseReason.RELEASED

    def closed(self, reason: CloseReason, now: float) -> SenderClosed | None:
        """What the scheduler side is told of its end, if there is KV to let go of."""
        if self.offer is None:
            return None
        return SenderClosed(
            self.transfer_id,
            self.offer.generation,
            reason,
            int(self.tokens),
            self.size,
            now - self.offered_at,
            self.stamps,
        )

    def is_read_from(self, generation: int) -> bool:
        """Whether a WRITE reads from the blocks of a generation."""
        return any(generation in c.writes.values() for c in self.claims.values())


def why_closed(reason: CloseReason, handoff: Handoff, lease: float) -> str:
    """What those are told who ask for it later; ``lease`` is in seconds."""
    match reason:
        case CloseReason.EXPIRED:
            return (
                f"the KV was kept for {lease:g} s (kv_lease_duration) and then released"
            )
        case CloseReason.WITHDRAWN:
            return handoff.withdrawn or "withdrawn"
        case CloseReason.SERVED | CloseReason.RELEASED:
            return (
                "all announced receivers are served; a router that sends n > 1 must "
                "set num_receivers"
            )


def grant(
    offer: Offer,
    want: Want,
    registration_id: RegistrationId,
    seconds: float,
    block_size: int,
) -> LeaseGranted:
    """A lease of ``seconds`` on the blocks of ``offer`` that hold ``want``."""
    return LeaseGranted(
        registration_id,
        offer.generation,
        seconds,
        tuple(pack_blocks(group) for group in _blocks_of(offer, want, block_size)),
        block_size,
    )


def is_of(done: ReadDone, offer: Offer, want: Want, block_size: int) -> bool:
    """Whether what was read are the blocks of ``offer`` that hold ``want``."""
    return done.generation == offer.generation and done.blocks == blocks_digest(
        _blocks_of(offer, want, block_size)
    )


def is_early(handoff: Handoff, claim: Claim) -> bool:
    """Whether a READ for it may have ended before this rank knows of the offer.

    The engine has told the router once all ranks had computed theirs. D says again
    that it has read.
    """
    return claim.state is ClaimState.WAITING and handoff.stage is not Stage.AWAITED


def _blocks_of(offer: Offer, want: Want, block_size: int) -> list[BlockArray]:
    wanted = want.block_range(block_size)
    return [group[wanted.start : wanted.stop] for group in offer.blocks]


def next_writes(computed: Computed, claim: Claim, block_size: int) -> list[StartWrite]:
    """Begin to WRITE what has been computed for ``claim`` since the last time."""
    if claim.failure or claim.cancel_requested or claim.abandoned:
        return []
    parts = len(computed.tokens)
    if not claim.written_to:
        claim.written_to = [claim.want.first_token] * parts
    return [
        _write(computed.offer, claim, part, parts, end, block_size)
        for part, tokens in enumerate(computed.tokens)
        if (end := min(tokens, claim.want.end)) > claim.written_to[part]
    ]


def _write(
    offer: Offer, claim: Claim, part: int, parts: int, end: int, block_size: int
) -> StartWrite:
    assert claim.blocks is not None
    want, begin, chunk = claim.want, claim.written_to[part], claim.chunks
    tokens = Want(want.prompt_tokens, begin, end - begin, b"")
    here = tokens.block_range(block_size)
    of_theirs = want.block_size or block_size
    first, wanted = want.first_token // of_theirs, tokens.block_range(of_theirs)
    there = slice(wanted.start - first, wanted.stop - first)
    claim.state = ClaimState.WRITING
    claim.chunks += 1
    claim.written_to[part] = end
    claim.writes[chunk] = offer.generation
    return StartWrite(
        claim.peer,
        claim.registration_id,
        chunk,
        claim.is_written,
        tokens,
        tuple(group[here.start : here.stop] for group in offer.blocks),
        tuple(group[there] for group in claim.blocks),
        part,
        parts,
    )


def answer_to_written(handoff: Handoff, claim: Claim) -> Answer | None:
    """What a receiver gets whose WRITEs have all ended; ``None`` if more follow."""
    registration_id = claim.registration_id
    if claim.failure is not None:
        return Refused(registration_id, claim.failure)
    if claim.cancel_requested:
        return Cancelled(registration_id)
    if claim.is_written:
        return Finished(registration_id)
    if claim.abandoned:
        return Refused(registration_id, "the decode engine was lost")
    if handoff.withdrawn is not None:
        return Refused(registration_id, handoff.withdrawn)
    return None


def is_part(want: Want, offer: Offer, block_size: int) -> bool:
    """Whether ``want`` is a part of what ``offer`` holds, and begins with a block.

    With unequal block sizes that is a block of the smaller ones.
    """
    smaller = min(want.block_size or block_size, block_size)
    return (
        want.first_token >= 0
        and want.num_tokens >= 1
        and want.first_token % smaller == 0
        and want.end <= offer.prompt_tokens
    )


def unfit(offer: Offer, claim: Claim, block_size: int) -> str | None:
    """Why ``claim`` cannot be served from ``offer``; ``None`` if it can."""
    want = claim.want
    if want.prompt_tokens != offer.prompt_tokens:
        return (
            f"the decode prompt has {want.prompt_tokens} tokens, "
            f"the prefill prompt {offer.prompt_tokens}"
        )
    if want.digest and offer.digest and want.digest != offer.digest:
        return "the prompts of the two legs differ"
    if not is_part(want, offer, block_size):
        return (
            f"tokens {want.first_token}+{want.num_tokens} are no block-aligned "
            f"part of a prompt of {offer.prompt_tokens}"
        )
    if claim.blocks is not None:
        count = len(want.block_range(want.block_size or block_size))
        sizes = [len(group) for group in claim.blocks]
        if sizes != [count] * len(offer.blocks):
            return f"{sizes} blocks registered, {count} per group needed"
    return None
