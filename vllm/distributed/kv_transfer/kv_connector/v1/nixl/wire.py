# SPDX-License-Identifier: Apache-2.0
"""Messages between engines: NIXL notifications and the side channel.

Every message is a tagged msgpack array. The receiver knows the sender of a
notification from NIXL; a notification carries the sender's :class:`RankInfo`
until the receiver has acknowledged it, so that order does not matter.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .ids import AgentName, EngineId, RegistrationId, TransferId

PROTOCOL_VERSION = 4

MAX_PACKET_BYTES = 16 << 20
"""Larger notifications are dropped unread: 16 MiB is 4 million block ids."""

MAX_RANK_BYTES = 4 << 20
"""Largest encoded :class:`RankInfo`: its receiver keeps it."""

DIGEST_BYTES = 16
"""Length of what stands for a block's content in :class:`Kept`, or for block ids."""

MAX_REASON_CHARS = 1000
"""Of a peer's reason for something, so much is kept."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Tokens, blocks, receivers."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Bytes."""

Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""One computation of a prompt; see :func:`.ids.new_generation`."""

Piece: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
"""A chunk, or a piece of one; the receiver keeps the numbers."""

_SHORT = msgspec.Meta(
    min_length=1, max_length=512, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z"
)
Transfer: TypeAlias = Annotated[TransferId, _SHORT]
Registration: TypeAlias = Annotated[RegistrationId, _SHORT]
"""Ids of a bounded length, since tables keep them, and of one line, since logs do."""

Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]

BlockArray: TypeAlias = npt.NDArray[np.int32]


class WireError(ValueError):
    """Bytes that are not a message of this protocol version."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """A part of what one lane of a page holds of its tokens, say their keys.

    Granule ``i`` is ``granule`` tokens, and of them ``granule_bytes`` bytes in each of
    ``rows`` rows: at ``offset + row * row_stride + i * granule_bytes`` of the lane.
    ``order`` tells the order of those bytes, where it is not that of tokens.
    """

    offset: Size
    rows: Count
    row_stride: Size
    granule: Count
    granule_bytes: Size
    order: Annotated[str, msgspec.Meta(max_length=64)] = ""


class RegionInfo(msgspec.Struct, frozen=True, array_like=True):
    """One layer's cache: ``num_blocks`` pages of ``page_bytes``, evenly spaced.

    Addresses and sizes are in bytes; ``group`` indexes the KV cache group whose
    block table addresses the pages.

    A page is for ``tokens`` tokens. It consists of ``kernel_blocks`` equal pieces, each
    for so many consecutive tokens, and such a piece of ``lanes`` equal lanes. Where
    heads lie outside tokens, a lane is one of the ``heads`` KV heads that this rank
    has of the layer's ``model_heads``; otherwise there is one lane. ``planes`` tells
    how tokens lie in a lane; where it is empty, they cannot be told apart, and pages
    move whole. ``window`` is the number of tokens at the end of a prompt that the layer
    keeps for sure; block 0 then stands for no block. It is 0 where all are kept.
    """

    layer: str
    group: int
    address: int
    page_bytes: int
    stride: int
    num_blocks: int
    device_id: int
    tokens: Count = 0
    heads: Count = 1
    model_heads: Count = 1
    lanes: Count = 1
    kernel_blocks: Count = 1
    planes: tuple[Plane, ...] = ()
    window: Count = 0


class ProcessInfo(msgspec.Struct, frozen=True, array_like=True):
    """What identifies a process on its host, to tell later whether it is gone."""

    boot_id: str
    pid: int
    start_ticks: int


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """All that a peer must know of one worker rank.

    ``compat`` holds the facts that must be equal on both sides, by the name
    under which a refusal reports them; ``layout`` those that must be equal even
    where compatibility is not enforced; ``transport`` those that are told to people.
    """

    protocol: int
    engine_id: Annotated[EngineId, _SHORT]
    agent_name: Annotated[AgentName, _SHORT]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    block_size: int
    mem_type: str
    agent_metadata: bytes
    regions: tuple[RegionInfo, ...]
    compat: dict[str, str]
    layout: dict[str, str]
    process: ProcessInfo
    transport: dict[str, str] = {}


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


class HelloAck(_Message, frozen=True, tag="hello_ack"):
    """The sender's RankInfo has arrived. ``refusal`` says why it is unusable."""

    refusal: str | None


class Register(_Message, frozen=True, tag="register"):
    """D → P (push): write ``want`` into these blocks of mine.

    ``blocks`` holds, per KV cache group, little-endian int32 block ids for the
    block positions from ``want.first_token // block_size`` on.
    """

    transfer_id: Transfer
    registration_id: Registration
    want: Want
    blocks: tuple[bytes, ...]


class LeaseRequest(_Message, frozen=True, tag="lease_request"):
    """D → P (pull): let me read ``want``."""

    transfer_id: Transfer
    registration_id: Registration
    want: Want


class Accepted(_Message, frozen=True, tag="accepted"):
    """P → D: known, and waiting for the prompt to be computed."""

    registration_id: Registration


class LeaseGranted(_Message, frozen=True, tag="lease_granted"):
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


class Done(_Message, frozen=True, tag="done"):
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


class Finished(_Message, frozen=True, tag="finished"):
    """P → D (push): all pieces have landed; the answer to a repeated Register."""

    registration_id: Registration


class Refused(_Message, frozen=True, tag="refused"):
    """P → D: it will not happen, and nothing of mine writes for it any more."""

    registration_id: Registration
    reason: str


class Cancel(_Message, frozen=True, tag="cancel"):
    """D → P: stop; I want to use the blocks for something else."""

    registration_id: Registration
    transfer_id: Transfer


class Cancelled(_Message, frozen=True, tag="cancelled"):
    """P → D: nothing of mine writes for this registration any more."""

    registration_id: Registration


class ReadDone(_Message, frozen=True, tag="read_done"):
    """D → P (pull): my READ has ended.

    ``blocks`` is the :func:`blocks_digest` of what it has read, which P compares with
    what it has leased: D may have read before it had P's answer. ``want`` is that of
    its :class:`LeaseRequest`, which may have been lost.
    """

    registration_id: Registration
    transfer_id: Transfer
    generation: Generation
    ok: bool
    want: Want
    blocks: Digest


class ReadConfirmed(_Message, frozen=True, tag="read_confirmed"):
    """P → D (pull): whether the blocks were yours until your READ had ended."""

    registration_id: Registration
    ok: bool


class NotNeeded(_Message, frozen=True, tag="not_needed"):
    """D → P: ``receivers`` of this hand-off will not ask; 0 stands for all."""

    transfer_id: Transfer
    receivers: Count


class Renew(_Message, frozen=True, tag="renew"):
    """D → P: requests of mine still wait to ask for these."""

    transfer_ids: tuple[Transfer, ...]


class Ping(_Message, frozen=True, tag="ping"):
    """Are you there?"""


class Pong(_Message, frozen=True, tag="pong"):
    """I am."""


class Goodbye(_Message, frozen=True, tag="goodbye"):
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
    """The sender's encoded :class:`RankInfo`, and its proof of holding the token."""

    rank: bytes
    proof: bytes


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """One notification."""

    protocol: int
    hello: Hello | None
    body: Message


class GetRanks(_Message, frozen=True, tag=f"get_ranks_{PROTOCOL_VERSION}"):
    """Side channel: who are your workers? See :mod:`.others` for the fields."""

    pp_rank: int = 0
    tp_rank: int = 0


class GetIntegrity(_Message, frozen=True, tag="get_integrity"):
    """Side channel: free blocks, pins and table sizes."""


class GetHandoffs(_Message, frozen=True, tag="get_handoffs"):
    """Side channel: the latest finished hand-offs."""


class GetFailure(_Message, frozen=True, tag="get_failure"):
    """Side channel: what became of this hand-off?"""

    transfer_id: Transfer


class Lookup(_Message, frozen=True, tag="lookup"):
    """Side channel: what do you keep of the turn that had this name?"""

    transfer_id: Transfer


class Release(_Message, frozen=True, tag="release"):
    """Side channel: the KV of that turn is not needed any more."""

    transfer_id: Transfer


class Ranks(_Message, frozen=True, tag="ranks"):
    """Answer to :class:`GetRanks`: encoded :class:`RankInfo` of each worker."""

    ranks: tuple[bytes, ...]


class Report(_Message, frozen=True, tag="report"):
    """Answer to the queries for people and tools: a JSON document."""

    json: bytes


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """KV of one request that a decode engine keeps, and what tells its content.

    ``name`` stands for the hand-off's in the messages about the READ. The digests
    are of :data:`DIGEST_BYTES` each, one per full block: of the engine's block
    hashes, comparable where ``hashing`` is equal, and of the tokens alone, empty
    where tokens do not tell all. ``tail`` is of the tokens after the last full
    block, empty where there are none or tokens do not tell all.
    """

    name: Transfer
    generation: Count
    num_tokens: Count
    block_size: Count
    hashing: str
    hash_digests: bytes
    token_digests: bytes
    tail: bytes


class Found(_Message, frozen=True, tag="found"):
    """Answer to :class:`Lookup`: one entry per answer that was kept, or none."""

    kept: tuple[Kept, ...]


class SideChannelError(_Message, frozen=True, tag="error"):
    """Answer to a request that cannot be served."""

    reason: str


SideChannelRequest: TypeAlias = (
    GetRanks | GetIntegrity | GetHandoffs | GetFailure | Lookup | Release
)
SideChannelReply: TypeAlias = Ranks | Report | Found | SideChannelError


def printable(text: str) -> str:
    """What a peer has said, made fit for a log: one line of a bounded length."""
    text = text[:MAX_REASON_CHARS]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()[:MAX_REASON_CHARS]
    return text


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_packet_decoder = msgspec.msgpack.Decoder(Packet)
_rank_decoder = msgspec.msgpack.Decoder(RankInfo)
_request_decoder = msgspec.msgpack.Decoder(SideChannelRequest)
_reply_decoder = msgspec.msgpack.Decoder(SideChannelReply)


def encode(value: msgspec.Struct) -> bytes:
    """Encode any struct of this module."""
    return _encoder.encode(value)


def _decode(
    decoder: msgspec.msgpack.Decoder[_T],
    data: bytes,
    what: str,
    limit: int = MAX_PACKET_BYTES,
) -> _T:
    if len(data) > limit:
        raise WireError(f"{what} of {len(data)} bytes exceeds {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {what}: {printable(str(error))}") from error


def decode_packet(data: bytes) -> Packet:
    """Decode a notification.

    Raises:
        WireError: it is not one, or of another protocol version.
    """
    packet = _decode(_packet_decoder, data, "notification")
    if packet.protocol != PROTOCOL_VERSION:
        raise WireError(
            f"notification of protocol {packet.protocol}, expected {PROTOCOL_VERSION}"
        )
    return packet


def decode_rank(data: bytes) -> RankInfo:
    """Decode a worker's description; raises :class:`WireError`."""
    return _decode(_rank_decoder, data, "rank description", MAX_RANK_BYTES)


def decode_request(data: bytes) -> SideChannelRequest:
    """Decode a side-channel request; raises :class:`WireError`."""
    return _decode(_request_decoder, data, "side-channel request")


def decode_reply(data: bytes) -> SideChannelReply:
    """Decode a side-channel reply; raises :class:`WireError`."""
    return _decode(_reply_decoder, data, "side-channel reply")


def pack_blocks(blocks: npt.ArrayLike) -> bytes:
    """Block ids as little-endian int32."""
    return np.asarray(blocks, dtype="<i4").tobytes()


def unpack_blocks(data: bytes) -> BlockArray:
    """The inverse of :func:`pack_blocks`; raises :class:`WireError`."""
    if len(data) % 4:
        raise WireError(f"block list of {len(data)} bytes is not a list of int32")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def blocks_digest(groups: Iterable[npt.ArrayLike]) -> bytes:
    """What stands for the block ids of all groups, in their order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for group in groups:
        packed = pack_blocks(group)
        digest.update(len(packed).to_bytes(8, "little"))
        digest.update(packed)
    return digest.digest()
