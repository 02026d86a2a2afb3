# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked on its side channel, and what it answers."""

from typing import TypeAlias

import msgspec

from .codec import PROTOCOL_VERSION, Count, Tagged, Transfer, decode


class GetRanks(Tagged, frozen=True, tag=f"get_ranks_{PROTOCOL_VERSION}"):
    """Who are your workers? See :mod:`.others` for the fields."""

    pp_rank: int = 0
    tp_rank: int = 0


class GetIntegrity(Tagged, frozen=True, tag="get_integrity"):
    """Free blocks, pins and table sizes."""


class GetHandoffs(Tagged, frozen=True, tag="get_handoffs"):
    """The latest finished hand-offs."""


class GetFailure(Tagged, frozen=True, tag="get_failure"):
    """What became of this hand-off?"""

    transfer_id: Transfer


class Lookup(Tagged, frozen=True, tag="lookup"):
    """What do you keep of the turn that had this name?"""

    transfer_id: Transfer


class Release(Tagged, frozen=True, tag="release"):
    """The KV of that turn is not needed any more."""

    transfer_id: Transfer


class Ranks(Tagged, frozen=True, tag="ranks"):
    """Answer to :class:`GetRanks`: encoded :class:`.RankInfo` of each worker."""

    ranks: tuple[bytes, ...]


class Report(Tagged, frozen=True, tag="report"):
    """Answer to the queries for people and tools: a JSON document."""

    json: bytes


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """KV of one request that a decode engine keeps, and what tells its content.

    ``name`` stands for the hand-off's in the messages about the READ. The digests
    are of :data:`.DIGEST_BYTES` each, one per full block: of the engine's block
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


class Found(Tagged, frozen=True, tag="found"):
    """Answer to :class:`Lookup`: one entry per answer that was kept, or none."""

    kept: tuple[Kept, ...]


class SideChannelError(Tagged, frozen=True, tag="error"):
    """Answer to a request that cannot be served."""

    reason: str


SideChannelRequest: TypeAlias = (
    GetRanks | GetIntegrity | GetHandoffs | GetFailure | Lookup | Release
)
SideChannelReply: TypeAlias = Ranks | Report | Found | SideChannelError

_request_decoder = msgspec.msgpack.Decoder(SideChannelRequest)
_reply_decoder = msgspec.msgpack.Decoder(SideChannelReply)


def decode_request(data: bytes) -> SideChannelRequest:
    """Decode a side-channel request; raises :class:`.WireError`."""
    return decode(_request_decoder, data, "side-channel request")


def decode_reply(data: bytes) -> SideChannelReply:
    """Decode a side-channel reply; raises :class:`.WireError`."""
    return decode(_reply_decoder, data, "side-channel reply")
