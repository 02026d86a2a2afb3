# SPDX-License-Identifier: Apache-2.0
"""What ranks say to each other, and bytes that are no message."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    pack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    MAX_PACKET_BYTES,
    PROTOCOL_VERSION,
    WireError,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    Goodbye,
    Hello,
    HelloAck,
    LeaseGranted,
    LeaseRequest,
    Message,
    NotNeeded,
    Packet,
    Ping,
    Pong,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
    Want,
    decode_packet,
)

T, R = TransferId("t"), RegistrationId("r")
WANT = Want(100, 32, 68, b"digest")

MESSAGES: list[Message] = [
    HelloAck(None),
    HelloAck("no"),
    Register(T, R, WANT, (pack_blocks([1, 2]),)),
    LeaseRequest(T, R, WANT),
    Accepted(R),
    LeaseGranted(R, 3, 30.0, (b"", pack_blocks([7]))),
    Done(R, 5, True, 1, 2, 3, 4),
    Finished(R),
    Refused(R, "no"),
    Cancel(R, T),
    Cancelled(R),
    ReadDone(R, T, 3, True, WANT, b"digest"),
    ReadConfirmed(R, False),
    NotNeeded(T, 0),
    Renew((T, T)),
    Ping(),
    Pong(),
    Goodbye(),
]


def test_every_message_is_covered() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("hello", [None, Hello(b"rank", b"proof")])
def test_messages_survive_the_wire(message: Message, hello: Hello | None) -> None:
    packet = Packet(PROTOCOL_VERSION, hello, message)
    assert decode_packet(encode(packet)) == packet


def test_another_protocol_version_is_named() -> None:
    data = encode(Packet(PROTOCOL_VERSION + 1, None, Ping()))
    with pytest.raises(WireError, match=f"protocol {PROTOCOL_VERSION + 1}, expected"):
        decode_packet(data)


def test_a_huge_message_is_not_read() -> None:
    with pytest.raises(WireError, match="exceeds"):
        decode_packet(b"\0" * (MAX_PACKET_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        ["done", "r", -1, 1, 1, 1],
        ["done", "r", 1, 2**31, 1, 1],
        ["done", "", 1, 1, 1, 1],
        ["done", "r" * 513, 1, 1, 1, 1],
        ["done", "r", "1", 1, 1, 1],
        ["done", "r"],
        ["not_needed", "t", -1],
        ["register", "t", "r", [1, 2, 3, b"x" * 65], []],
        ["register", "t", "r", None, []],
        ["lease_granted", "r", -1, 1.0, []],
        ["unheard of"],
        [],
        {},
        None,
    ],
)
def test_values_out_of_bounds_are_refused(body: object) -> None:
    data = msgspec.msgpack.encode([PROTOCOL_VERSION, None, body])
    with pytest.raises(WireError):
        decode_packet(data)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode_packet(b"\x91" * 100_000 + b"\xc0")


_SEEDS = [encode(Packet(PROTOCOL_VERSION, None, message)) for message in MESSAGES]


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(_SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data) - 1))
        data[place] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_damaged() | st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        value = decode_packet(data)
    except WireError:
        return
    assert isinstance(value, Packet)
