# SPDX-License-Identifier: Apache-2.0
"""Whatever a client or a peer says: a value, or a refusal of the right kind."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.arena import NoReports, free_address
from v1.kv_connector.unit.nixl.hostile import (
    PARAMS,
    WILD,
    bodies,
    json_values,
    mutations,
    params,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    KEPT_PREFIX,
    AgentName,
    EngineId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    MAX_ID_CHARS,
    MAX_RANKS,
    MAX_RECEIVERS,
    DecodeParams,
    ParamsError,
    PrefillParams,
    parse_params,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    MAX_REQUEST_BYTES,
    Address,
    SideChannelServer,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import unpack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    MAX_PACKET_BYTES,
    PROTOCOL_VERSION,
    WireError,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Goodbye,
    Hello,
    Packet,
    decode_packet,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    GetFailure,
    GetHandoffs,
    GetIntegrity,
    GetRanks,
    Kept,
    Lookup,
    Ranks,
    Release,
    Report,
    SideChannelError,
    decode_reply,
    decode_request,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    ProcessInfo,
    RankInfo,
    RegionInfo,
    decode_rank,
)

THOROUGH = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
BRIEF = settings(THOROUGH, max_examples=60)
PATIENCE_S = 10.0

T = TypeVar("T")


# ---- kv_transfer_params


def _check_id(value: object) -> None:
    assert value is None or (isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS)
    if isinstance(value, str):
        value.encode()


def check_params(value: object) -> None:
    """Parse, and check all that the rest relies on."""
    try:
        parsed = parse_params(value)
    except ParamsError as error:
        told = str(error)
        parsed = None
    else:
        told = ""
    assert told.isprintable()
    assert len(told) < 1000
    if told:
        return
    match parsed:
        case PrefillParams():
            _check_id(parsed.transfer_id)
            count = parsed.num_receivers
            assert count is None or (type(count) is int and 0 < count <= MAX_RECEIVERS)
            if (earlier := parsed.earlier) is not None:
                _check_id(earlier.transfer_id)
                _check_id(earlier.host)
                assert type(earlier.port) is int
                assert 0 < earlier.port < 65536
        case DecodeParams():
            address = parsed.address
            for name in (
                parsed.transfer_id,
                parsed.remote_request_id,
                parsed.releases,
                address.host,
                address.engine_id,
            ):
                _check_id(name)
            for name in (parsed.transfer_id, parsed.remote_request_id):
                assert name is None or not name.startswith(KEPT_PREFIX)
            assert type(parsed.retain) is bool
            assert type(address.port) is int
            assert 0 < address.port < 65536
            for size in (address.tp_size, address.pp_size):
                assert type(size) is int
                assert 0 < size <= MAX_RANKS
        case _:
            assert parsed is None
            assert value is None or isinstance(value, dict)


@THOROUGH
@given(st.one_of(json_values, params))
def test_any_json_as_params(value: object) -> None:
    check_params(value)


@pytest.mark.parametrize("value", [p for _, p in PARAMS], ids=[n for n, _ in PARAMS])
def test_the_corpus_as_params(value: object) -> None:
    check_params(value)


@pytest.mark.parametrize("value", [v for _, v in WILD], ids=[name for name, _ in WILD])
def test_every_field_may_be_anything(value: object) -> None:
    good = {
        "transfer_id": "t",
        "remote_host": "h",
        "remote_port": 1,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "tp_size": 1,
        "pp_size": 1,
        "num_receivers": 1,
    }
    for leg in ("do_remote_prefill", "do_remote_decode"):
        for key in ("do_remote_prefill", "do_remote_decode", *good):
            check_params({leg: True, **good, key: value})


# ---- messages


DECODERS: list[Callable[[bytes], object]] = [
    decode_packet,
    decode_rank,
    decode_request,
    decode_reply,
    unpack_blocks,
]

RANK = RankInfo(
    protocol=PROTOCOL_VERSION,
    engine_id=EngineId("engine"),
    agent_name=AgentName("agent"),
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    block_size=16,
    mem_type="DRAM",
    agent_metadata=bytes(range(256)),
    regions=(RegionInfo("layer", 0, 1 << 47, 4096, 4096, 100, 0),) * 4,
    compat={"model": "m"},
    layout={"dtype": "float32"},
    process=ProcessInfo("boot", 1, 2),
)
SIDE_CHANNEL = [
    GetRanks(),
    GetIntegrity(),
    GetHandoffs(),
    GetFailure(TransferId("t")),
    Lookup(TransferId("t")),
    Release(TransferId("t")),
    Found((Kept(TransferId("kept-0"), 1, 17, 16, "h", bytes(16), bytes(16), b"t"),)),
    Ranks((encode(RANK), b"")),
    Report(b"{}"),
    SideChannelError("no"),
]


def check_decoders(data: bytes) -> None:
    for decoder in DECODERS:
        try:
            value = decoder(data)
        except WireError as error:
            told = str(error)
            value = None
        else:
            told = ""
        assert told.isprintable()
        assert len(told) < 2000
        if isinstance(value, msgspec.Struct):
            assert decoder(encode(value)) == value


@THOROUGH
@given(st.binary(max_size=300))
def test_any_bytes_as_a_message(data: bytes) -> None:
    check_decoders(data)


@THOROUGH
@given(st.one_of(bodies, st.just(Goodbye())), st.booleans(), mutations)
def test_a_message_that_was_tampered_with(
    body: Any, introduced: bool, mutate: Callable[[bytes], bytes]
) -> None:
    hello = Hello(encode(RANK), b"proof") if introduced else None
    check_decoders(mutate(encode(Packet(PROTOCOL_VERSION, hello, body))))


@THOROUGH
@given(st.sampled_from([RANK, *SIDE_CHANNEL]), mutations)
def test_a_description_or_question_that_was_tampered_with(
    message: msgspec.Struct, mutate: Callable[[bytes], bytes]
) -> None:
    check_decoders(mutate(encode(message)))


@THOROUGH
@given(json_values)
def test_any_msgpack_as_a_message(value: object) -> None:
    try:
        data = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return
    check_decoders(data)
    check_decoders(msgspec.msgpack.encode([PROTOCOL_VERSION, None, value]))


def _packet_with(element: bytes) -> bytes:
    """A Renew whose list of ids is these bytes of msgpack."""
    return b"\x93\x01\xc0\x92\xa5renew" + element


HUGE = [
    pytest.param(b"\x91" * (1 << 20), id="a million nested arrays"),
    pytest.param(b"\x81\xa1a" * (1 << 18), id="nested maps"),
    pytest.param(_packet_with(b"\x91" * (1 << 20)), id="nested in a message"),
    pytest.param(b"\xdd\xff\xff\xff\xff", id="an array of 4 billion"),
    pytest.param(_packet_with(b"\xdd\xff\xff\xff\xff"), id="ids, 4 billion"),
    pytest.param(_packet_with(b"\xdd\x7f\xff\xff\xff" + b"\xa1a" * 1000), id="cut off"),
    pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of 4 billion"),
    pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
    pytest.param(b"\xdb\xff\xff\xff\xff", id="4 GiB of text"),
    pytest.param(b"\xc9\xff\xff\xff\xff\x01", id="4 GiB of an extension"),
    pytest.param(bytes(MAX_PACKET_BYTES), id="zeros of the largest size"),
    pytest.param(bytes(MAX_PACKET_BYTES + 1), id="larger than the largest"),
    pytest.param(b"\xdd\x00\xff\xff\xff" + b"\x01" * 0xFFFFFF, id="16 million ints"),
]


@pytest.mark.parametrize("data", HUGE)
def test_huge_claims_take_no_memory(data: bytes) -> None:
    check_decoders(data)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096])
def test_block_lists_are_whole_numbers(size: int) -> None:
    data = bytes(size)
    if size % 4:
        with pytest.raises(WireError, match=f"block list of {size} bytes"):
            unpack_blocks(data)
    else:
        assert unpack_blocks(data).tolist() == [0] * (size // 4)
        assert unpack_blocks(data).dtype == np.int32


# ---- the side channel


class Reports(NoReports):
    """Answers; for some hand-offs with what cannot be written as JSON."""

    def integrity(self) -> object:
        return {"free_blocks": 7}

    def handoffs(self) -> object:
        return []

    def failure(self, transfer_id: TransferId) -> object:
        if transfer_id == "raises":
            raise RuntimeError("a defect")
        return object() if transfer_id == "unwritable" else None


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    address = free_address()
    running = SideChannelServer(address, [encode(RANK)], Reports())
    yield address
    running.close()


def check_alive(address: Address) -> None:
    """It answers the next good request, and rightly."""
    reply = query(address, GetIntegrity(), PATIENCE_S)
    assert isinstance(reply, Report)
    assert json.loads(reply.json) == {"free_blocks": 7}


def dealer(address: Address) -> "zmq.Socket[bytes]":
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 1000)
    sock.connect(f"tcp://{address[0]}:{address[1]}")
    return sock


frames = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"", bytes(MAX_REQUEST_BYTES), *map(encode, SIDE_CHANNEL)]),
)


@BRIEF
@given(
    batches=st.lists(st.lists(frames, min_size=1, max_size=8), min_size=1, max_size=20)
)
def test_any_frames_at_the_side_channel(
    server: Address, batches: list[list[bytes]]
) -> None:
    with dealer(server) as sock:
        for parts in batches:
            sock.send_multipart(parts)
        for parts in batches:
            # Every question has its answer, on the way back by which it came.
            assert sock.poll(int(PATIENCE_S * 1000))
            *route, answer = sock.recv_multipart()
            assert route == parts[:-1]
            decode_reply(answer)
    check_alive(server)


@pytest.mark.parametrize("name", ["raises", "unwritable", "unknown"])
def test_a_defect_in_a_report_is_an_answer(server: Address, name: str) -> None:
    with dealer(server) as sock:
        sock.send_multipart([b"", encode(GetFailure(TransferId(name)))])
        assert sock.poll(int(PATIENCE_S * 1000))
        reply = decode_reply(sock.recv_multipart()[-1])
    assert isinstance(reply, Report if name == "unknown" else SideChannelError)
    check_alive(server)


def test_a_frame_over_the_limit_is_not_taken(server: Address) -> None:
    with dealer(server) as sock:
        sock.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])
        assert not sock.poll(300)
    check_alive(server)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


@BRIEF
@given(
    chunks=st.lists(st.binary(max_size=300), max_size=8),
    greeting=st.sampled_from([b"", GREETING, GREETING[:12], b"GET / HTTP/1.1\r\n\r\n"]),
)
def test_any_bytes_on_the_wire_of_the_side_channel(
    server: Address, chunks: list[bytes], greeting: bytes
) -> None:
    with socket.create_connection(server, PATIENCE_S) as stream:
        try:
            for chunk in (greeting, *chunks):
                stream.sendall(chunk)
        except OSError:
            pass  # It has hung up, as it may.
        check_alive(server)
    check_alive(server)


def test_askers_that_leave_before_the_answer(server: Address) -> None:
    for _ in range(50):
        with dealer(server) as sock:
            sock.send_multipart([b"", encode(GetRanks())])
    check_alive(server)
