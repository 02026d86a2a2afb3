# SPDX-License-Identifier: Apache-2.0
"""What all messages share: version, bounds, and the way to bytes and back."""

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ..ids import RegistrationId, TransferId

PROTOCOL_VERSION = 4

MAX_PACKET_BYTES = 16 << 20
"""Larger messages are dropped unread: 16 MiB is 4 million block ids."""

MAX_REASON_CHARS = 1000
"""Of a peer's reason for something, so much is kept."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Tokens, blocks, receivers."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Bytes."""

SHORT = msgspec.Meta(
    min_length=1, max_length=512, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z"
)
"""An id's form."""

Transfer: TypeAlias = Annotated[TransferId, SHORT]
Registration: TypeAlias = Annotated[RegistrationId, SHORT]
"""Ids of a bounded length, since tables keep them, and of one line, since logs do."""


class WireError(ValueError):
    """Bytes that are not a message of this protocol version."""


class Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message; its tag tells it from the others of a union."""


def printable(text: str) -> str:
    """What a peer has said, made fit for a log: one line of a bounded length."""
    text = text[:MAX_REASON_CHARS]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()[:MAX_REASON_CHARS]
    return text


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    """Encode any struct of this package."""
    return _encoder.encode(value)


def decode(
    decoder: msgspec.msgpack.Decoder[_T],
    data: bytes,
    what: str,
    limit: int = MAX_PACKET_BYTES,
) -> _T:
    """Decode ``data`` of up to ``limit`` bytes, which is meant to be a ``what``.

    Raises:
        WireError: it is longer, or none.
    """
    if len(data) > limit:
        raise WireError(f"{what} of {len(data)} bytes exceeds {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {what}: {printable(str(error))}") from error
