# SPDX-License-Identifier: Apache-2.0
"""Messages on the wire, and bytes that are none."""

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    RegistrationId,
    TransferId,
    new_agent_name,
    new_registration_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    MAX_PACKET_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    GetFailure,
    GetHandoffs,
    GetIntegrity,
    GetRanks,
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
    Ranks,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
    Report,
    SideChannelError,
    Want,
    WireError,
    decode_packet,
    decode_rank,
    decode_reply,
    decode_request,
    encode,
    pack_blocks,
    unpack_blocks,
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


@pytest.mark.parametrize(
    "request_", [GetRanks(1), GetIntegrity(), GetHandoffs(), GetFailure(T)]
)
def test_requests_survive_the_wire(request_: msgspec.Struct) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize(
    "reply", [Ranks((b"a",)), Report(b"{}"), SideChannelError("no")]
)
def test_replies_survive_the_wire(reply: msgspec.Struct) -> None:
    assert decode_reply(encode(reply)) == reply


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
    for decode in (decode_packet, decode_rank, decode_request, decode_reply):
        try:
            value = decode(data)
        except WireError:
            continue
        assert isinstance(value, msgspec.Struct)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_block_lists_survive_the_wire(blocks: list[int]) -> None:
    unpacked = unpack_blocks(pack_blocks(blocks))
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == blocks


def test_half_a_block_id_is_refused() -> None:
    with pytest.raises(WireError, match="5 bytes"):
        unpack_blocks(b"12345")


def test_new_ids_are_new() -> None:
    assert len({new_registration_id() for _ in range(100)}) == 100
    engine = EngineId("e")
    names = {new_agent_name(engine, 0) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("e:0:") for name in names)
