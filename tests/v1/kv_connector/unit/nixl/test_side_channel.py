# SPDX-License-Identifier: Apache-2.0
"""The side channel over real sockets, with guests that misbehave."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from v1.kv_connector.unit.nixl.arena import NoReports
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import side_channel
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.others import other_asker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    MAX_LOOKUPS,
    MAX_REQUEST_BYTES,
    Address,
    Handshake,
    HandshakeClient,
    SideChannelFailure,
    SideChannelServer,
    endpoint,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetFailure,
    GetHandoffs,
    GetIntegrity,
    GetRanks,
    Ranks,
    Report,
    SideChannelError,
    SideChannelReply,
    decode_reply,
)

pytestmark = pytest.mark.timeout(60)


class _Reports(NoReports):
    """Answers; the hand-offs cannot be told."""

    def integrity(self) -> object:
        return {"free_blocks": 3}

    def handoffs(self) -> object:
        raise RuntimeError("out of order")

    def failure(self, transfer_id: TransferId) -> object:
        return {"transfer_id": transfer_id}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def address() -> Address:
    return ("127.0.0.1", _free_port())


@pytest.fixture
def server(address: Address) -> Iterator[SideChannelServer]:
    server = SideChannelServer(address, [encode(HERE)], _Reports())
    yield server
    server.close()


def _report(
    address: Address, request: GetIntegrity | GetHandoffs | GetFailure
) -> object:
    reply = query(address, request, 5)
    assert isinstance(reply, Report)
    return json.loads(reply.json)


def _shake(client: HandshakeClient, *addresses: Address) -> dict[Address, Handshake]:
    ended: dict[Address, Handshake] = {}
    for address in addresses:
        client.start(address, time.monotonic())
    end = time.monotonic() + 20
    while len(ended) < len(addresses):
        assert time.monotonic() < end
        for handshake in client.poll(time.monotonic()):
            ended[handshake.address] = handshake
        time.sleep(0.005)
    assert not client.pending
    return ended


@pytest.mark.usefixtures("server")
def test_queries_are_answered(address: Address) -> None:
    assert _report(address, GetIntegrity()) == {"free_blocks": 3}
    assert _report(address, GetFailure(TransferId("t"))) == {"transfer_id": "t"}
    assert query(address, GetRanks(), 5) == Ranks((encode(HERE),))


@pytest.mark.usefixtures("server")
def test_an_answer_that_fails_does_not_end_the_server(address: Address) -> None:
    with pytest.raises(SideChannelFailure, match="RuntimeError: out of order"):
        _report(address, GetHandoffs())
    assert _report(address, GetIntegrity()) == {"free_blocks": 3}


def _ask(address: Address, question: object) -> SideChannelReply:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(endpoint(address))
        asker.send(msgspec.msgpack.encode(question))
        assert asker.poll(5000)
        return decode_reply(asker.recv())


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("question", "said"),
    [
        (["get_ranks_0005", 0, 0], "remote 0005)"),
        (["get_ranks_5", "all", "else", "is new", {}], "remote 5)"),
        (["get_ranks", 3], "remote an older one)"),
        ([b"get_meta_msg", 0, 0], "the other engine has the base's connector"),
    ],
)
def test_engines_of_other_makes_are_told_so(
    address: Address, monkeypatch: pytest.MonkeyPatch, question: object, said: str
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        side_channel.logger, "warning", lambda text, *v: logged.append(text % v)
    )
    reply = _ask(address, question)
    assert isinstance(reply, SideChannelError)
    assert said in reply.reason
    assert said in logged[0]
    assert query(address, GetRanks(), 5) == Ranks((encode(HERE),))


@pytest.mark.parametrize("question", [[], [1], ["get_ranks_55555", 0, 0], {}, "x" * 99])
def test_other_questions_introduce_nobody(question: object) -> None:
    assert other_asker(msgspec.msgpack.encode(question)) is None
    assert other_asker(b"get_ranks") is None
    assert other_asker(msgspec.msgpack.encode(["get_ranks_5", "x" * 300])) is None


@pytest.mark.usefixtures("server")
def test_rubbish_harms_nobody(address: Address) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    frames = [
        [b"", b"rubbish"],
        [b"alone"],
        [b"", b""],
        [b"a", b"b", b"c", encode(GetIntegrity())],
        [b"", b"\x91" * 10_000],
        [b"", b"\0" * (MAX_REQUEST_BYTES + 1)],
    ]
    for parts in frames:
        with context.socket(zmq.DEALER) as guest:
            guest.setsockopt(zmq.LINGER, 1000)
            guest.connect(endpoint(address))
            guest.send_multipart(parts)
            guest.poll(100)
    with socket.create_connection(address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with context.socket(zmq.DEALER) as gone:
        gone.setsockopt(zmq.LINGER, 0)
        gone.connect(endpoint(address))
        gone.send_multipart([b"", encode(GetIntegrity())])
    assert _report(address, GetIntegrity()) == {"free_blocks": 3}


@pytest.mark.usefixtures("server")
def test_an_address_in_use_is_named(address: Address) -> None:
    with pytest.raises(SideChannelFailure, match=f"{address[1]}.*SIDE_CHANNEL_PORT"):
        SideChannelServer(address, [], _Reports())


def test_a_closed_server_frees_its_address_soon(address: Address) -> None:
    SideChannelServer(address, [], _Reports()).close()
    end = time.monotonic() + 5
    while True:
        try:
            SideChannelServer(address, [], _Reports()).close()
            return
        except SideChannelFailure:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_nobody_there_is_a_failure(address: Address) -> None:
    with pytest.raises(SideChannelFailure, match="did not answer"):
        query(address, GetIntegrity(), 0.2)


@pytest.mark.parametrize("host", ["", "no host", "a" * 300, "h\0st", "nowhere.invalid"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(SideChannelFailure, match="cannot resolve"):
        endpoint((host or "\0", 1))


def test_addresses_of_both_families() -> None:
    assert endpoint(("127.0.0.1", 5)) == "tcp://127.0.0.1:5"
    assert endpoint(("::1", 5)) == "tcp://[::1]:5"


@pytest.mark.usefixtures("server")
def test_handshakes_with_several_engines_at_once(address: Address) -> None:
    silent = ("127.0.0.1", _free_port())
    unknown = ("h\0st", 1)
    ended = _shake(HandshakeClient(0.3), address, silent, unknown)
    assert ended[address].ranks == (HERE,)
    assert ended[address].failure is None
    assert "handshake_timeout" in (ended[silent].failure or "")
    assert "cannot resolve" in (ended[unknown].failure or "")


@pytest.mark.usefixtures("server")
def test_a_silent_engine_holds_nobody_up(address: Address) -> None:
    client, silent = HandshakeClient(60), ("127.0.0.1", _free_port())
    client.start(silent, time.monotonic())
    client.start(address, time.monotonic())
    ended: list[Handshake] = []
    end = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < end
        ended = client.poll(time.monotonic())
        time.sleep(0.005)
    assert [handshake.address for handshake in ended] == [address]
    assert client.pending
    client.close()


def test_an_engine_that_starts_late_is_met(address: Address) -> None:
    client = HandshakeClient(10)
    client.start(address, time.monotonic())
    client.start(address, time.monotonic())
    assert client.poll(time.monotonic()) == []
    server = SideChannelServer(address, [encode(HERE)], _Reports())
    try:
        assert _shake(client, address)[address].ranks == (HERE,)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([b"rubbish"], "not a rank description"), ([], None)],
)
def test_a_strange_answer_is_a_failure(
    address: Address, ranks: list[bytes], said: str | None
) -> None:
    server = SideChannelServer(address, ranks, _Reports())
    try:
        failure = _shake(HandshakeClient(5), address)[address].failure
    finally:
        server.close()
    assert (said in (failure or "")) if said else failure is None


def test_a_slow_name_server_holds_nobody_up(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    resolve = socket.getaddrinfo

    def slowly(host: Any, port: Any, **options: Any) -> Any:
        if host != "slow.example":
            return resolve(host, port, **options)
        answered.wait(30)
        return resolve("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    server = SideChannelServer(address, [encode(HERE)], _Reports())
    late, slow = HandshakeClient(0.2), ("slow.example", address[1])
    try:
        assert "cannot resolve" in (_shake(late, slow)[slow].failure or "")
        client = HandshakeClient(20)
        client.start(slow, time.monotonic())
        assert client.poll(time.monotonic()) == []
        assert _shake(HandshakeClient(20), address)[address].ranks == (HERE,)
        answered.set()
        assert _shake(client, slow)[slow].ranks == (HERE,)
        assert late.poll(time.monotonic()) == []
    finally:
        answered.set()
        server.close()


def test_lookups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        answered.wait(30)
        raise OSError("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    client = HandshakeClient(30)
    for index in range(MAX_LOOKUPS + 1):
        client.start((f"slow{index}.example", 1), 0)
    (refused,) = client.poll(0)
    assert "too many" in (refused.failure or "")
    client.close()
    answered.set()


def test_an_abandoned_handshake_leaves_nothing(address: Address) -> None:
    client = HandshakeClient(10)
    client.start(address, 0)
    client.close()
    assert not client.pending
