# SPDX-License-Identifier: Apache-2.0
"""Who may speak to this engine, where a shared token is configured.

All engines, routers and tools of a deployment read the same token file. From it
derive the key pairs of ZMQ's CURVE security, which encrypts the side channel and
leaves a peer without the token unanswered, and the proof by which an agent
introduces itself in a NIXL notification.
"""

import hashlib
import hmac
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import zmq
from zmq.utils import z85

from .config import ConfigError
from .ids import AgentName

MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096


class Token:
    """A shared secret; it is never sent."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, path: str | None) -> "Token | None":
        """Read ``side_channel_token_file``; surrounding white space is not part of it.

        Raises:
            ConfigError: the file cannot be read, or its content is no secret.
        """
        if path is None:
            return None
        try:
            with Path(path).open("rb") as file:
                secret = file.read(MAX_TOKEN_BYTES + 1).strip()
        except OSError as error:
            raise ConfigError(
                f"side_channel_token_file {path!r} cannot be read: {error.strerror}"
            ) from error
        if not MIN_TOKEN_BYTES <= len(secret) <= MAX_TOKEN_BYTES:
            raise ConfigError(
                f"side_channel_token_file {path!r} holds {len(secret)} bytes, expected "
                f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; make one with "
                "`openssl rand -hex 32`"
            )
        return cls(secret)

    def secure_server(self, sock: "zmq.Socket[bytes]") -> None:
        """Let only holders of the token connect to a socket that is to be bound."""
        sock.curve_secretkey = self._key("server")
        sock.curve_publickey = zmq.curve_public(self._key("server"))
        sock.curve_server = True

    def secure_client(self, sock: "zmq.Socket[bytes]") -> None:
        """Connect as a holder of the token."""
        sock.curve_secretkey = self._key("client")
        sock.curve_publickey = zmq.curve_public(self._key("client"))
        sock.curve_serverkey = zmq.curve_public(self._key("server"))

    def introduction(self, sender: AgentName, receiver: AgentName) -> bytes:
        """Proof that ``sender`` holds the token, of use to ``receiver`` alone.

        Agent names are new in every incarnation, so an overheard one opens nothing.
        """
        text = f"hello|{len(sender)}|{sender}|{receiver}".encode()
        return hmac.digest(self._secret, text, "sha256")

    def _key(self, role: str) -> bytes:
        seed = hmac.digest(self._secret, f"curve|{role}".encode(), hashlib.sha256)
        encoded: bytes = z85.encode(seed)
        return encoded


def introduced(
    token: Token | None, proof: bytes, sender: AgentName, receiver: AgentName
) -> bool:
    """Whether an introduction is good; without a token all are."""
    if token is None:
        return True
    return hmac.compare_digest(token.introduction(sender, receiver), proof)


class AllowedPeers:
    """The hosts that a decode engine may be told to contact.

    Args:
        patterns: host names, addresses, or networks such as ``10.0.0.0/8``; none
            at all allows every host.

    Raises:
        ConfigError: a pattern that looks like a network and is none.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names = {p.casefold() for p in patterns if "/" not in p}
        self._networks = []
        for pattern in patterns:
            try:
                self._networks.append(ip_network(pattern))
            except ValueError as error:
                if "/" not in pattern:
                    continue
                raise ConfigError(
                    f"allowed_peers has {pattern!r}, which is no network: {error}"
                ) from error
        self._open = not patterns

    def allows(self, host: str) -> bool:
        """Whether ``host``, as the client wrote it, may be contacted."""
        if self._open or host.casefold() in self._names:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)
