# SPDX-License-Identifier: Apache-2.0
"""Asks engines what became of a hand-off, and tells them what to let go of.

The few messages are spelled out here because the package that defines them loads
the whole engine: hundreds of megabytes that a router has no other use for.
"""

import asyncio
import hashlib
import hmac
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from .config import Address, ConfigError
from .workers import Worker

logger = logging.getLogger("pd_router")

ANSWER_SECONDS = 1.0
GLANCE_SECONDS = 0.25
"""For questions while a client waits for its first token."""
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096

_MAX_ANSWER_BYTES = 64 << 10
"""Of an answer to a router; others may be told of all hand-offs."""
_MAX_TEXT = 1000

# What engines record where the router itself has ended a leg, or the other engine.
_OF_OUR_MAKING = frozenset({"aborted", "released", "withdrawn"})


class UnansweredError(Exception):
    """An engine did not say anything usable."""


class _GetFailure(msgspec.Struct, frozen=True, array_like=True, tag="get_failure"):
    transfer_id: str


class _Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    transfer_id: str


class _Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    json: bytes


class _Error(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    reason: str


class HandoffRecord(msgspec.Struct, frozen=True):
    """What an engine knows of a hand-off that has ended there.

    ``outcome`` is a word; ``cause`` says why it failed, if it did.
    """

    outcome: Annotated[str, msgspec.Meta(min_length=1)]
    cause: str = ""


_answer_decoder = msgspec.msgpack.Decoder(_Report | _Error)
_record_decoder = msgspec.json.Decoder(HandoffRecord | None)


class Token:
    """The secret that all engines and routers of a deployment share."""

    def __init__(self, secret: bytes) -> None:
        self._client = self._key(secret, "client")
        self._server_public = zmq.curve_public(self._key(secret, "server"))

    @classmethod
    def load(cls, path: str) -> "Token":
        """Read the file that engines have as ``side_channel_token_file``.

        Raises:
            ConfigError: the file cannot be read, or its content is no secret.
        """
        try:
            with Path(path).open("rb") as file:
                secret = file.read(MAX_TOKEN_BYTES + 1).strip()
        except OSError as error:
            raise ConfigError(
                f"--side-channel-token-file {path!r} cannot be read: {error.strerror}"
            ) from error
        if not MIN_TOKEN_BYTES <= len(secret) <= MAX_TOKEN_BYTES:
            raise ConfigError(
                f"--side-channel-token-file {path!r} holds {len(secret)} bytes, "
                f"expected {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; give the file that "
                "the engines have as side_channel_token_file"
            )
        return cls(secret)

    def secure(self, sock: zmq.asyncio.Socket) -> None:
        """Connect as a holder of the token."""
        sock.curve_secretkey = self._client
        sock.curve_publickey = zmq.curve_public(self._client)
        sock.curve_serverkey = self._server_public

    @staticmethod
    def _key(secret: bytes, role: str) -> bytes:
        seed = hmac.digest(secret, f"curve|{role}".encode(), hashlib.sha256)
        encoded: bytes = z85.encode(seed)
        return encoded


class SideChannelClient:
    """Questions to engines' side channels; needs a running event loop.

    Args:
        max_bytes: longest answer that is taken.
        seconds: how long one may take; ``ANSWER_SECONDS`` by default.
    """

    def __init__(
        self,
        token: Token | None = None,
        *,
        max_bytes: int = _MAX_ANSWER_BYTES,
        seconds: float | None = None,
    ) -> None:
        self._token = token
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._context: zmq.asyncio.Context | None = None

    async def explain(self, transfer_id: str, workers: Iterable[Worker]) -> str | None:
        """What these workers say of a hand-off, within ``ANSWER_SECONDS``.

        ``None`` where none of them knows of anything. Workers whose side channel
        is not configured are not asked.
        """
        told = await asyncio.gather(
            *(self._ask(worker, transfer_id) for worker in workers)
        )
        return "; ".join(text for text in told if text) or None

    async def ended(self, transfer_id: str, workers: Iterable[Worker]) -> bool:
        """Whether a hand-off has ended at any of these workers, as far as they tell.

        Only those are asked whose side channel is configured, and only for
        ``GLANCE_SECONDS``.
        """

        async def one(address: Address) -> bool:
            try:
                return (
                    await self.record(address, transfer_id, GLANCE_SECONDS) is not None
                )
            except UnansweredError as error:
                logger.info("side channel %s: %s", address, error)
                return False

        addresses = [worker.spec.report_address for worker in workers]
        return any(await asyncio.gather(*(one(known) for known in addresses if known)))

    async def record(
        self, address: Address, transfer_id: str, seconds: float | None = None
    ) -> HandoffRecord | None:
        """Ask one engine; ``None`` where it knows of no end of this hand-off.

        Raises:
            UnansweredError: no usable answer within ``seconds``, which are
                ``ANSWER_SECONDS`` where they are not given.
        """
        report = await self.report(address, _GetFailure(transfer_id), seconds)
        try:
            return _record_decoder.decode(report)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnansweredError(f"the answer is no record: {error}") from error

    async def release(self, address: Address, transfer_id: str) -> None:
        """Let an engine drop what it keeps of a turn; it does so at its next step.

        Raises:
            UnansweredError: no usable answer within ``ANSWER_SECONDS``.
        """
        await self.report(address, _Release(transfer_id))

    def close(self) -> None:
        """Abandon what is under way."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _ask(self, worker: Worker, transfer_id: str) -> str | None:
        address = worker.spec.report_address
        if address is None:
            return None
        try:
            record = await self.record(address, transfer_id)
        except UnansweredError as error:
            logger.warning("%s: its side channel %s: %s", worker, address, error)
            return None
        if record is None or (not record.cause and record.outcome in _OF_OUR_MAKING):
            return None
        text = record.cause or f"the hand-off's outcome is {record.outcome!r}"
        return f"{worker.role} engine: {_line(text)}"

    async def report(
        self,
        address: Address,
        question: msgspec.Struct,
        seconds: float | None = None,
    ) -> bytes:
        """Ask what is answered with a JSON document.

        Raises:
            UnansweredError: no usable answer in time.
        """
        if seconds is None:
            seconds = ANSWER_SECONDS if self._seconds is None else self._seconds
        try:
            async with asyncio.timeout(seconds):
                payload = await self._exchange(address, question)
        except TimeoutError as error:
            raise UnansweredError(
                f"no answer within {seconds:g} s; is the address right, and "
                "--side-channel-token-file the engines' own?"
            ) from error
        except (OSError, UnicodeError, zmq.ZMQError) as error:
            raise UnansweredError(str(error)) from error
        try:
            answer = _answer_decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnansweredError(f"the answer is no report: {error}") from error
        if isinstance(answer, _Error):
            raise UnansweredError(_line(answer.reason))
        return answer.json

    async def _exchange(self, address: Address, question: msgspec.Struct) -> bytes:
        endpoint = await _endpoint(address)
        if self._context is None:
            self._context = zmq.asyncio.Context()
        sock = self._context.socket(zmq.REQ)
        try:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
            if self._token is not None:
                self._token.secure(sock)
            sock.connect(endpoint)
            await sock.send(msgspec.msgpack.encode(question))
            payload = await sock.recv()
            assert isinstance(payload, bytes)
            return payload
        finally:
            sock.close()


def _line(text: str) -> str:
    """An engine's words, fit for a log."""
    text = text[:_MAX_TEXT]
    return text if text.isprintable() else text.encode("unicode_escape").decode()


async def _endpoint(address: Address) -> str:
    """The ZMQ endpoint of an address, IPv4 first as the engines bind it."""
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )
    *_, sockaddr = min(found, key=lambda item: item[0] != socket.AF_INET)
    return f"tcp://{Address(str(sockaddr[0]), address.port)}"
