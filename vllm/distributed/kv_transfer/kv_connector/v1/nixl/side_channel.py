# SPDX-License-Identifier: Apache-2.0
"""The side channel: a ZMQ socket on which an engine tells who its workers are.

The server runs in the scheduler process. :class:`Exchanges` never waits and is for
the engine's own threads; :func:`query` is for tools and does.
"""

import queue
import socket
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from vllm.logger import init_logger

from .auth import Token
from .ids import TransferId
from .others import ANSWER_FRAMES, NO_ANSWER, other_asker
from .wire.codec import MAX_PACKET_BYTES, WireError, encode, printable
from .wire.questions import (
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
    SideChannelReply,
    SideChannelRequest,
    decode_reply,
    decode_request,
)
from .wire.ranks import RankInfo, decode_rank

logger = init_logger(__name__)

K = TypeVar("K", bound=Hashable)

Address = tuple[str, int]
"""Host and port of a side channel."""

MAX_REQUEST_BYTES = 64 << 10
MAX_RANKS = 4096
MAX_LOOKUPS = 16
"""Host names that are resolved at a time; each takes a thread for that long."""

_POLL_MS = 250


class SideChannelFailure(RuntimeError):
    """An exchange over the side channel that brought no usable answer."""


def endpoint(address: Address) -> str:
    """The ZMQ endpoint of an address; names are resolved, IPv4 first.

    Raises:
        SideChannelFailure: the name cannot be resolved.
    """
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise SideChannelFailure(f"cannot resolve host {host!r}: {error}") from error
    family, *_, sockaddr = min(found, key=lambda item: item[0] != socket.AF_INET)
    ip = str(sockaddr[0])
    return f"tcp://[{ip}]:{port}" if family == socket.AF_INET6 else f"tcp://{ip}:{port}"


def _resolve(address: Address) -> str | SideChannelFailure:
    try:
        return endpoint(address)
    except SideChannelFailure as error:
        return error


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class Reports(Protocol):
    """Answers to queries, as JSON-able values; called on the server's thread."""

    def integrity(self) -> object:
        """Free blocks, pins by state, entries per table, totals."""

    def handoffs(self) -> object:
        """The latest finished hand-offs."""

    def failure(self, transfer_id: TransferId) -> object:
        """What became of one hand-off; ``None`` where nothing is known."""

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        """What is kept of a turn of a conversation."""

    def release(self, transfer_id: TransferId) -> object:
        """Let go of it, soon; what is known of it."""


class SideChannelServer:
    """Answers handshakes and queries until it is closed.

    Args:
        address: where to listen; the host decides the interface.
        ranks: encoded :class:`RankInfo` of every worker.
        reports: what the queries are answered from, on the server's thread.
        token: the secret that askers must hold, if any.

    Raises:
        SideChannelFailure: the address cannot be bound.
    """

    def __init__(
        self,
        address: Address,
        ranks: Sequence[bytes],
        reports: Reports,
        token: Token | None = None,
    ) -> None:
        self._ranks = tuple(ranks)
        self._reports = reports
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if token is not None:
            token.secure_server(self._socket)
        try:
            self._socket.bind(endpoint(address))
        except zmq.ZMQError as error:
            self._socket.close()
            raise SideChannelFailure(
                f"cannot listen on {address[0]}:{address[1]} ({error}); set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT to an "
                "address of this host and a free port"
            ) from error
        self._thread = threading.Thread(
            target=self._serve, name="nixl-side-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; returns when the thread has ended."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._socket as sock:
            while not self._stop.is_set():
                try:
                    if not sock.poll(_POLL_MS):
                        continue
                    *route, payload = sock.recv_multipart(zmq.NOBLOCK)
                    sock.send_multipart(
                        [*route, encode(self._answer(payload))], zmq.NOBLOCK
                    )
                except zmq.ZMQError as error:
                    # The asker went away, or sent a frame over the limit.
                    logger.debug("side channel: %s", error)
                except Exception:
                    logger.exception("side channel: a request was not answered")

    def _answer(self, payload: bytes) -> SideChannelReply:
        try:
            request = decode_request(payload)
            match request:
                case GetRanks():
                    return Ranks(self._ranks)
                case GetIntegrity():
                    return Report(msgspec.json.encode(self._reports.integrity()))
                case GetHandoffs():
                    return Report(msgspec.json.encode(self._reports.handoffs()))
                case GetFailure():
                    return Report(
                        msgspec.json.encode(self._reports.failure(request.transfer_id))
                    )
                case Lookup():
                    return Found(self._reports.lookup(request.transfer_id))
                case Release():
                    return Report(
                        msgspec.json.encode(self._reports.release(request.transfer_id))
                    )
        except WireError as error:
            other = other_asker(payload)
            if other is not None:
                # It may not understand the answer.
                logger.warning("side channel: a handshake is refused: %s", other)
            return SideChannelError(other or str(error))
        except Exception as error:
            # Whatever is asked, the next one must get an answer too.
            logger.exception("side channel: a request failed")
            return SideChannelError(f"{type(error).__name__}: {error}")


def query(
    address: Address,
    request: SideChannelRequest,
    timeout: float,
    token: Token | None = None,
) -> SideChannelReply:
    """Ask once and wait up to ``timeout`` seconds.

    Raises:
        SideChannelFailure: no answer, or an error as the answer.
    """
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.REQ) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_PACKET_BYTES)
        if token is not None:
            token.secure_client(sock)
        sock.connect(endpoint(address))
        sock.send(encode(request))
        if not sock.poll(int(timeout * 1000)):
            raise SideChannelFailure(
                f"{address[0]}:{address[1]} did not answer within {timeout:g} s"
            )
        return _usable(sock.recv())


def _usable(payload: bytes) -> SideChannelReply:
    try:
        reply = decode_reply(payload)
    except WireError as error:
        raise SideChannelFailure(str(error)) from error
    if isinstance(reply, SideChannelError):
        raise SideChannelFailure(printable(reply.reason))
    return reply


@dataclass(frozen=True)
class Exchange(Generic[K]):
    """The end of one exchange: an answer, or why there is none."""

    key: K
    reply: SideChannelReply | None
    failure: str = ""


class Exchanges(Generic[K]):
    """Questions to any number of engines, told apart by keys; no call waits."""

    def __init__(
        self, timeout: float, timeout_key: str, token: Token | None = None
    ) -> None:
        self._timeout = timeout
        self._timeout_text = f"{timeout:g} s ({timeout_key})"
        self._token = token
        self._open: dict[K, tuple[zmq.Socket[bytes], Address, float]] = {}
        self._resolving: dict[K, tuple[Address, SideChannelRequest, float]] = {}
        self._resolved: queue.SimpleQueue[tuple[K, str | SideChannelFailure]] = (
            queue.SimpleQueue()
        )
        self._lookups = threading.BoundedSemaphore(MAX_LOOKUPS)
        self._failed: list[Exchange[K]] = []

    @property
    def pending(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._open or self._resolving or self._failed)

    def start(
        self, key: K, address: Address, request: SideChannelRequest, now: float
    ) -> None:
        """Ask the engine at ``address``, unless a question of this key is open."""
        if key in self._open or key in self._resolving:
            return
        deadline = now + self._timeout
        if _is_numeric(address[0]):
            self._ask(key, address, request, _resolve(address), deadline)
        elif self._lookups.acquire(blocking=False):
            self._resolving[key] = (address, request, deadline)
            threading.Thread(
                target=self._look_up,
                args=(key, address),
                name="nixl-lookup",
                daemon=True,
            ).start()
        else:
            failure = f"host {address[0]!r}: too many names are being resolved"
            self._failed.append(Exchange(key, None, failure))

    def poll(self, now: float) -> list[Exchange[K]]:
        """Exchanges that have ended since the last call."""
        self._take_lookups(now)
        ended, self._failed = self._failed, []
        for key, (sock, address, deadline) in list(self._open.items()):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if now <= deadline:
                    continue
                failure = (
                    f"no answer from the side channel at {address[0]}:{address[1]} "
                    f"within {self._timeout_text}; check that the engine is up, the "
                    "port is open and both sides have the same "
                    "side_channel_token_file"
                )
                ended.append(Exchange(key, None, failure))
            else:
                ended.append(self._answered(key, address, frames))
            sock.close()
            del self._open[key]
        return ended

    def abandon(self, key: K) -> None:
        """The answer is not wanted any more."""
        self._resolving.pop(key, None)
        sock, _, _ = self._open.pop(key, (None, None, None))
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Abandon all that is open."""
        for key in (*self._open, *self._resolving):
            self.abandon(key)

    def _look_up(self, key: K, address: Address) -> None:
        # A name server may take its time, which the caller does not have.
        try:
            self._resolved.put((key, _resolve(address)))
        finally:
            self._lookups.release()

    def _ask(
        self,
        key: K,
        address: Address,
        request: SideChannelRequest,
        resolved: str | SideChannelFailure,
        deadline: float,
    ) -> None:
        if isinstance(resolved, SideChannelFailure):
            self._failed.append(Exchange(key, None, str(resolved)))
            return
        try:
            # There may be no socket left: a context has a limit.
            sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self._failed.append(Exchange(key, None, str(error)))
            return
        try:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_PACKET_BYTES)
            if self._token is not None:
                self._token.secure_client(sock)
            sock.connect(resolved)
            sock.send_multipart([b"", encode(request)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            sock.close()
            self._failed.append(Exchange(key, None, str(error)))
            return
        self._open[key] = (sock, address, deadline)

    def _take_lookups(self, now: float) -> None:
        while not self._resolved.empty():
            key, resolved = self._resolved.get()
            waiting = self._resolving.pop(key, None)
            if waiting is not None:
                address, request, deadline = waiting
                self._ask(key, address, request, resolved, deadline)
        for key, (address, _, deadline) in list(self._resolving.items()):
            if now > deadline:
                del self._resolving[key]
                failure = (
                    f"cannot resolve host {address[0]!r} within {self._timeout_text}"
                )
                self._failed.append(Exchange(key, None, failure))

    @staticmethod
    def _answered(key: K, address: Address, frames: list[bytes]) -> Exchange[K]:
        try:
            if len(frames) != ANSWER_FRAMES:
                raise SideChannelFailure(NO_ANSWER)
            return Exchange(key, _usable(frames[-1]))
        except SideChannelFailure as error:
            failure = f"the side channel at {address[0]}:{address[1]}: {error}"
            return Exchange(key, None, failure)


@dataclass(frozen=True)
class Handshake:
    """The end of one handshake: the peer's workers, or why there are none."""

    address: Address
    ranks: tuple[RankInfo, ...] = ()
    failure: str | None = None


class HandshakeClient:
    """Handshakes in progress with any number of engines; no call waits."""

    def __init__(self, timeout: float, token: Token | None = None) -> None:
        self._exchanges: Exchanges[Address] = Exchanges(
            timeout, "handshake_timeout", token
        )

    @property
    def pending(self) -> bool:
        """Whether an answer is awaited."""
        return self._exchanges.pending

    def start(self, address: Address, now: float) -> None:
        """Ask ``address`` for its workers, unless that is under way."""
        self._exchanges.start(address, address, GetRanks(), now)

    def poll(self, now: float) -> list[Handshake]:
        """Handshakes that have ended since the last call."""
        return [self._result(ended) for ended in self._exchanges.poll(now)]

    def close(self) -> None:
        """Abandon what is in progress."""
        self._exchanges.close()

    @staticmethod
    def _result(ended: Exchange[Address]) -> Handshake:
        address, reply = ended.key, ended.reply
        if reply is None:
            return Handshake(address, failure=ended.failure)
        try:
            if not isinstance(reply, Ranks):
                raise SideChannelFailure(f"unexpected {type(reply).__name__}")
            if len(reply.ranks) > MAX_RANKS:
                raise SideChannelFailure(f"more than {MAX_RANKS} ranks")
            ranks = tuple(decode_rank(rank) for rank in reply.ranks)
        except (SideChannelFailure, WireError) as error:
            return Handshake(
                address,
                failure=f"handshake with {address[0]}:{address[1]} failed: {error}",
            )
        return Handshake(address, ranks)
