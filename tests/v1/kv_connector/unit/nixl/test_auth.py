# SPDX-License-Identifier: Apache-2.0
"""Who may speak to an engine: token files, CURVE, introductions, allowed peers."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import (
    MAX_TOKEN_BYTES,
    MIN_TOKEN_BYTES,
    AllowedPeers,
    Token,
    introduced,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    Handshake,
    HandshakeClient,
    SideChannelFailure,
    SideChannelServer,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetFailure,
    GetIntegrity,
    Kept,
    Lookup,
    Release,
    Report,
)

SECRET = b"0123456789abcdef0123456789abcdef"
SILENCE_S = 0.5
PATIENCE_S = 10.0


class Reports:
    """Counts the questions that reach it."""

    def __init__(self) -> None:
        self.asked = 0

    def integrity(self) -> object:
        self.asked += 1
        return {"free_blocks": 1}

    def handoffs(self) -> object:
        self.asked += 1
        return []

    def failure(self, transfer_id: TransferId) -> object:
        self.asked += 1
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        self.asked += 1
        return ()

    def release(self, transfer_id: TransferId) -> object:
        self.asked += 1
        return None


@contextmanager
def serving(token: Token | None) -> Iterator[tuple[Address, Reports]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", int(probe.getsockname()[1]))
    reports = Reports()
    server = SideChannelServer(address, [], reports, token)
    try:
        yield address, reports
    finally:
        server.close()


# ---- token files


def test_no_file_is_no_token() -> None:
    assert Token.load(None) is None


def test_white_space_around_a_token_is_not_part_of_it(tmp_path: Path) -> None:
    bare, padded = tmp_path / "bare", tmp_path / "padded"
    bare.write_bytes(SECRET)
    padded.write_bytes(b"\n\t " + SECRET + b"\r\n")
    one, other = Token.load(str(bare)), Token.load(str(padded))
    assert one is not None
    assert other is not None
    names = AgentName("a"), AgentName("b")
    assert one.introduction(*names) == other.introduction(*names)


@pytest.mark.parametrize("size", [MIN_TOKEN_BYTES, MAX_TOKEN_BYTES])
def test_tokens_of_the_allowed_sizes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"x" * size + b"\n")
    assert Token.load(str(path)) is not None


@pytest.mark.parametrize(
    ("content", "counted"),
    [
        (b"", 0),
        (b" \n" * 100, 0),
        (b"x" * (MIN_TOKEN_BYTES - 1), MIN_TOKEN_BYTES - 1),
        (b"x" * (MAX_TOKEN_BYTES + 1), MAX_TOKEN_BYTES + 1),
        (b"x" * (1 << 20), MAX_TOKEN_BYTES + 1),
    ],
)
def test_tokens_of_other_sizes_are_refused(
    tmp_path: Path, content: bytes, counted: int
) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Token.load(str(path))
    text = str(refused.value)
    assert f"side_channel_token_file {str(path)!r} holds {counted} bytes" in text
    assert "openssl rand -hex 32" in text


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as refused:
            Token.load(str(path))
        assert repr(str(path)) in str(refused.value)


# ---- the side channel


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_same_token_is_answered(secret: bytes | None) -> None:
    token = None if secret is None else Token(secret)
    with serving(token) as (address, reports):
        reply = query(address, GetIntegrity(), PATIENCE_S, token)
        assert isinstance(reply, Report)
        assert reply.json == b'{"free_blocks":1}'
        assert reports.asked == 1


STRANGERS = [
    pytest.param(None, SECRET, id="none"),
    pytest.param(SECRET[::-1], SECRET, id="another"),
    pytest.param(SECRET + b"x", SECRET, id="longer"),
    pytest.param(SECRET, None, id="not wanted"),
]


@pytest.mark.parametrize(("theirs", "ours"), STRANGERS)
def test_another_token_is_not_answered_and_asks_nothing(
    theirs: bytes | None, ours: bytes | None
) -> None:
    token = None if ours is None else Token(ours)
    stranger = None if theirs is None else Token(theirs)
    with serving(token) as (address, reports):
        turn = TransferId("t")
        for request in (GetIntegrity(), GetFailure(turn), Lookup(turn), Release(turn)):
            with pytest.raises(SideChannelFailure, match="did not answer"):
                query(address, request, SILENCE_S, stranger)
        assert reports.asked == 0
        assert isinstance(query(address, GetIntegrity(), PATIENCE_S, token), Report)
        assert reports.asked == 1


def _shaken(client: HandshakeClient, address: Address) -> Handshake:
    client.start(address, time.monotonic())
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for ended in client.poll(time.monotonic()):
            return ended
        time.sleep(0.01)
    raise AssertionError("the handshake has no end")


@pytest.mark.parametrize(("theirs", "ours"), STRANGERS)
def test_a_handshake_with_another_token_fails_and_says_why(
    theirs: bytes | None, ours: bytes | None
) -> None:
    token = None if ours is None else Token(ours)
    stranger = None if theirs is None else Token(theirs)
    with serving(token) as (address, _):
        client = HandshakeClient(SILENCE_S, stranger)
        try:
            failure = _shaken(client, address).failure
        finally:
            client.close()
        assert failure is not None
        assert "side_channel_token_file" in failure
        client = HandshakeClient(PATIENCE_S, token)
        try:
            assert _shaken(client, address).failure is None
        finally:
            client.close()


def test_a_plain_zmq_client_learns_nothing_from_a_secured_server() -> None:
    with serving(Token(SECRET)) as (address, reports):
        sock: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(f"tcp://{address[0]}:{address[1]}")
            sock.send_multipart([b"", b"anything"])
            assert not sock.poll(int(SILENCE_S * 1000))
        assert reports.asked == 0


# ---- introductions

names = st.text(min_size=1, max_size=40).map(AgentName)


@given(names, names, names, names)
def test_an_introduction_is_good_for_one_pair_of_agents(
    sender: AgentName, receiver: AgentName, other: AgentName, another: AgentName
) -> None:
    token = Token(SECRET)
    proof = token.introduction(sender, receiver)
    assert introduced(token, proof, sender, receiver)
    if (other, another) != (sender, receiver):
        assert not introduced(token, proof, other, another)
    if sender != receiver:
        assert not introduced(token, proof, receiver, sender)


def test_the_border_between_the_names_counts() -> None:
    token = Token(SECRET)
    proof = token.introduction(AgentName("a|b"), AgentName("c"))
    assert not introduced(token, proof, AgentName("a"), AgentName("b|c"))


@given(st.binary(max_size=64))
def test_no_other_proof_is_good(proof: bytes) -> None:
    token = Token(SECRET)
    assert not introduced(token, proof, AgentName("a"), AgentName("b"))


def test_a_proof_of_another_token_is_not_good() -> None:
    pair = AgentName("a"), AgentName("b")
    assert not introduced(Token(SECRET), Token(SECRET[::-1]).introduction(*pair), *pair)


def test_without_a_token_everybody_is_introduced() -> None:
    assert introduced(None, b"", AgentName("a"), AgentName("b"))


# ---- allowed peers


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        ([], ["anything", "::1", "10.0.0.1", ""], []),
        (
            ["prefill-1.example"],
            ["prefill-1.example", "PREFILL-1.Example"],
            ["prefill-1.example.", "prefill-1", "x.prefill-1.example", "10.0.0.1", ""],
        ),
        (
            ["10.0.0.7"],
            ["10.0.0.7"],
            ["10.0.0.70", "10.0.0.07", "10.7", "0x0a000007", "167772167", " 10.0.0.7"],
        ),
        (
            ["10.0.0.0/8"],
            ["10.0.0.0", "10.255.255.255"],
            ["11.0.0.0", "9.255.255.255", "::a00:0", "::ffff:10.0.0.1", "ten.example"],
        ),
        (["0.0.0.0/0"], ["1.2.3.4"], ["::1", "localhost"]),
        (
            ["fd00::1"],
            ["fd00::1", "FD00:0:0::1", "fd00:0000::0001"],
            ["fd00::2", "[fd00::1]"],
        ),
        (
            ["fd00::/8"],
            ["fd00::", "fdff::1"],
            ["fe00::1", "::1", "10.0.0.1"],
        ),
        (
            ["localhost", "127.0.0.0/8", "::1/128"],
            ["localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1"],
            ["128.0.0.1", "::2"],
        ),
    ],
)
def test_allowed_peers(
    patterns: list[str], allowed: list[str], refused: list[str]
) -> None:
    peers = AllowedPeers(patterns)
    assert [host for host in allowed if not peers.allows(host)] == []
    assert [host for host in refused if peers.allows(host)] == []


@pytest.mark.parametrize("pattern", ["10.0.0.1/8", "10.0.0.0/33", "host/24", "/"])
def test_networks_that_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AllowedPeers(["10.0.0.0/8", pattern])
    assert f"allowed_peers has {pattern!r}" in str(refused.value)


@given(st.text())
def test_whatever_host_a_client_names_there_is_an_answer(host: str) -> None:
    peers = AllowedPeers(["prefill", "10.0.0.0/8", "fd00::/8"])
    if peers.allows(host):
        assert host.casefold() == "prefill" or host[:2] in ("10", "fd", "FD", "fD")
