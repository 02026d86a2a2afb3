# SPDX-License-Identifier: Apache-2.0
"""What ranks of two engines say to each other about hand-offs, through NIXL.

The receiver knows the sender of a notification from NIXL; a notification carries the
sender's :class:`.RankInfo` until the receiver has acknowledged it, so that order does
not matter.
"""

from typing import Annotated, TypeAlias

import msgspec

from .codec import (
    PROTOCOL_VERSION,
    Count,
    Registration,
    Size,
    Tagged,
    Transfer,
    WireError,
    decode,
)

Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""One computation of a prompt; see :func:`.ids.new_generation`."""

Piece: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
"""A chunk, or a piece of one; the receiver keeps the numbers."""

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt's KV that a decode rank lacks.

    ``digest`` names the prompt's token ids (empty where there are none, as with
    prompt embeddings); positions are tokens from the start of the prompt. The rank's
    blocks have ``block_size`` tokens; 0: as many as those of who is told.
    """

    prompt_tokens: Count
    first_token: Count
    num_tokens: Count
    digest: Digest
    block_size: Count = 0

    @property
    def end(self) -> int:
        """The position after the last of these tokens."""
        return self.first_token + self.num_tokens

    def block_range(self, block_size: int) -> range:
        """Block positions in the prompt that hold these tokens."""
        return range(self.first_token // block_size, -(-self.end // block_size))


class HelloAck(Tagged, frozen=True, tag="hello_ack"):
    """The sender's RankInfo has arrived. ``refusal`` says why it is unusable."""

    refusal: str | None


class Register(Tagged, frozen=True, tag="register"):
    """D → P (push): write ``want`` into these blocks of mine.

    ``blocks`` holds, per KV cache group, little-endian int32 block ids for the
    block positions from ``want.first_token // block_size`` on.
    """

    transfer_id: Transfer
    registration_id: Registration
    want: Want
    blocks: tuple[bytes, ...]


class LeaseRequest(Tagged, frozen=True, tag="lease_request"):
    """D → P (pull): let me read ``want``."""

    transfer_id: Transfer
    registration_id: Registration
    want: Want


class Accepted(Tagged, frozen=True, tag="accepted"):
    """P → D: known, and waiting for the prompt to be computed."""

    registration_id: Registration


class LeaseGranted(Tagged, frozen=True, tag="lease_granted"):
    """P → D (pull): these blocks hold it, for ``seconds`` from now on.

    It is not taken back before, unless the reader has ended or says that it has read:
    a READ that has ended within ``seconds`` of the first request has read what was
    asked for.

    ``blocks`` is aligned with the request's ``want`` as in :class:`Register`; they
    have ``block_size`` tokens, 0: as many as the reader's.
    """

    registration_id: Registration
    generation: Generation
    seconds: float
    blocks: tuple[bytes, ...]
    block_size: Count = 0


class Done(Tagged, frozen=True, tag="done"):
    """P → D (push): piece ``seq`` of the ``total`` of one chunk has landed.

    ``last`` tells that no chunk has a higher number. ``bytes`` and ``descriptors``
    are those of the piece.

    It travels with the WRITE that it reports. Separate WRITEs have no order, so
    the receiver counts distinct pieces of each chunk, and chunks up to the last.
    """

    registration_id: Registration
    chunk: Piece
    last: bool
    seq: Piece
    total: Piece
    bytes: Size
    descriptors: Count


class Finished(Tagged, frozen=True, tag="finished"):
    """P → D (push): all pieces have landed; the answer to a repeated Register."""

    registration_id: Registration


class Refused(Tagged, frozen=True, tag="refused"):
    """P → D: it will not happen, and nothing of mine writes for it any more."""

    registration_id: Registration
    reason: str


class Cancel(Tagged, frozen=True, tag="cancel"):
    """D → P: stop; I want to use the blocks for something else."""

    registration_id: Registration
    transfer_id: Transfer


class Cancelled(Tagged, frozen=True, tag="cancelled"):
    """P → D: nothing of mine writes for this registration any more."""

    registration_id: Registration


class ReadDone(Tagged, frozen=True, tag="read_done"):
    """D → P (pull): my READ has ended.

    ``blocks`` is the :func:`.blocks_digest` of what it has read, which P compares with
    what it has leased: D may have read before it had P's answer. ``want`` is that of
    its :class:`LeaseRequest`, which may have been lost.
    """

    registration_id: Registration
    transfer_id: Transfer
    generation: Generation
    ok: bool
    want: Want
    blocks: Digest


class ReadConfirmed(Tagged, frozen=True, tag="read_confirmed"):
    """P → D (pull): whether the blocks were yours until your READ had ended."""

    registration_id: Registration
    ok: bool


class NotNeeded(Tagged, frozen=True, tag="not_needed"):
    """D → P: ``receivers`` of this hand-off will not ask; 0 stands for all."""

    transfer_id: Transfer
    receivers: Count


class Renew(Tagged, frozen=True, tag="renew"):
    """D → P: requests of mine still wait to ask for these."""

    transfer_ids: tuple[Transfer, ...]


class Ping(Tagged, frozen=True, tag="ping"):
    """Are you there?"""


class Pong(Tagged, frozen=True, tag="pong"):
    """I am."""


class Goodbye(Tagged, frozen=True, tag="goodbye"):
    """I am shutting down and have ended all my transfers."""


Message: TypeAlias = (
    HelloAck
    | Register
    | LeaseRequest
    | Accepted
    | LeaseGranted
    | Done
    | Finished
    | Refused
    | Cancel
    | Cancelled
    | ReadDone
    | ReadConfirmed
    | NotNeeded
    | Renew
    | Ping
    | Pong
    | Goodbye
)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The sender's encoded :class:`.RankInfo`, and its proof of holding the token."""

    rank: bytes
    proof: bytes


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """One notification."""

    protocol: int
    hello: Hello | None
    body: Message


_packet_decoder = msgspec.msgpack.Decoder(Packet)


def decode_packet(data: bytes) -> Packet:
    """Decode a notification.

    Raises:
        WireError: it is not one, or of another protocol version.
    """
    packet = decode(_packet_decoder, data, "notification")
    if packet.protocol != PROTOCOL_VERSION:
        raise WireError(
            f"notification of protocol {packet.protocol}, expected {PROTOCOL_VERSION}"
        )
    return packet
