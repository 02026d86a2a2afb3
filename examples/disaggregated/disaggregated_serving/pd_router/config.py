# SPDX-License-Identifier: Apache-2.0
"""Configuration of the routers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from .routing import RoutingSettings

DEFAULT_SIDE_CHANNEL_PORT = 5600


class ConfigError(ValueError):
    """A setting that cannot work; the text names the flag, value and remedy."""


class Mode(StrEnum):
    """Which side moves the KV cache."""

    PUSH = "push"
    PULL = "pull"


class Role(StrEnum):
    """What a worker does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker's HTTP server listens.

    ``dp_rank`` is the data-parallel rank that is meant, where one server has several.
    """

    host: str
    port: int
    dp_rank: int | None = None

    @classmethod
    def parse_worker(cls, text: str, flag: str) -> "Address":
        """Read ``host:port``, or ``host:port@rank`` for a data-parallel rank.

        Raises:
            ConfigError: the text is not such an address.
        """
        bare, at, rank = text.rpartition("@")
        if not at:
            return cls.parse(text, flag)
        if not rank.isdecimal():
            raise ConfigError(
                f"{flag} got {text!r}, where {rank!r} is no data-parallel rank; write "
                "for example 127.0.0.1:8100@0"
            )
        return replace(cls.parse(bare, flag), dp_rank=int(rank))

    @classmethod
    def parse(cls, text: str, flag: str) -> "Address":
        """Read ``host:port`` (IPv6 hosts in brackets, ``http://`` allowed).

        Raises:
            ConfigError: the text is not such an address.
        """
        bare = text.removeprefix("http://").rstrip("/")
        host, colon, port = bare.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not colon or not host or "/" in host or not _is_port(port):
            raise ConfigError(
                f"{flag} got {text!r}, which is not host:port with a port between "
                "1 and 65535; write for example 127.0.0.1:8100 or [::1]:8100"
            )
        return cls(host, int(port))

    @property
    def url(self) -> str:
        """Base URL of the worker."""
        return f"http://{self._server}"

    def __str__(self) -> str:
        return (
            self._server if self.dp_rank is None else f"{self._server}@{self.dp_rank}"
        )

    @property
    def _server(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SideChannel:
    """How a decode engine reaches a prefill engine for the KV hand-off.

    ``engine_id`` may be unknown: the decode engine then learns it in the
    handshake.
    """

    host: str
    port: int
    engine_id: str | None = None
    tp_size: int = 1
    pp_size: int = 1

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One engine as configured.

    ``side_channel`` is what push tells decode engines of a prefill engine;
    ``report_address`` is where the router may ask what became of a hand-off.
    """

    role: Role
    address: Address
    side_channel: SideChannel | None = None
    report_address: Address | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds on every wait, in seconds."""

    connect: float = 5.0
    prefill: float = 300.0
    first_event: float = 300.0
    idle: float = 300.0
    drain: float = 30.0
    health: float = 5.0


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """How a router remembers conversations.

    ``ttl`` is in seconds. ``sticky_margin`` is how many more legs than the least
    loaded decode engine a conversation's own may be running.
    """

    ttl: float = 420.0
    max_entries: int = 10_000
    sticky_margin: int = 8


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """All settings of one router process.

    Without ``conversations`` every request is served on its own. ``choose_early``
    has pull choose the decode engine before prefill, as push must. Choices of decode
    engines are noted in the file ``choice_log``. ``adapters`` are served beside
    ``model``.
    """

    mode: Mode
    workers: tuple[WorkerSpec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    adapters: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    admin_key: str | None = None
    side_channel_token_file: str | None = None
    retries: int = 1
    split_concurrency: int = 16
    max_prompts: int = 1024
    health_interval: float = 2.0
    keep_tool_choice: bool = False
    log_level: str = "info"
    conversations: ConversationSettings | None = None
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    choose_early: bool = False
    choice_log: Path | None = None


def check_workers(workers: Sequence[WorkerSpec], *, need_both: bool) -> None:
    """Refuse sets of workers that cannot serve.

    Raises:
        ConfigError: an address or side channel occurs twice, or a role is empty
            although ``need_both`` is set.
    """
    addresses: dict[Address, Role] = {}
    servers: dict[Address, Address] = {}
    channels: dict[tuple[str, int], Address] = {}
    for spec in workers:
        if spec.address in addresses:
            raise ConfigError(
                f"{spec.address} is listed as {addresses[spec.address]} and as "
                f"{spec.role}; every engine has one role and is listed once"
            )
        addresses[spec.address] = spec.role
        server = replace(spec.address, dp_rank=None)
        first = servers.setdefault(server, spec.address)
        if first != spec.address and (
            addresses[first] is not spec.role
            or None in (first.dp_rank, spec.address.dp_rank)
        ):
            raise ConfigError(
                f"{addresses[first]} {first} and {spec.role} {spec.address} are one "
                "server; list it once, or once for each of its data-parallel ranks as "
                f"{server}@0, {server}@1 and so on, with one role"
            )
        channel = spec.side_channel
        if channel is None:
            continue
        other = channels.setdefault((channel.host, channel.port), spec.address)
        if other != spec.address:
            raise ConfigError(
                f"prefill {other} and prefill {spec.address} share the side channel "
                f"{channel.host}:{channel.port}; give each its own value of "
                "--prefill-side-channel-port or --prefill-kv-host"
            )
    if need_both:
        for role in Role:
            if role not in addresses.values():
                raise ConfigError(
                    f"no --{role} worker is given; name at least one host:port, or "
                    "set --admin-key and add workers at run time"
                )


def check_decode_channels(workers: Sequence[WorkerSpec]) -> None:
    """Refuse decode workers that conversations cannot be continued from.

    Raises:
        ConfigError: the side channel of a decode worker is not given.
    """
    for spec in workers:
        if spec.role is Role.DECODE and spec.report_address is None:
            raise ConfigError(
                f"the side channel of decode {spec.address} is not given, and prefill "
                "reads a conversation's earlier turns there; give "
                "--decode-side-channel HOST:PORT once per --decode, in the same order, "
                "or side_channel where the worker is added at run time"
            )


def make_side_channel(
    address: Address,
    *,
    engine_id: str | None = None,
    kv_host: str | None = None,
    port: str | int | None = None,
    tp_size: str | int | None = None,
    pp_size: str | int | None = None,
) -> SideChannel:
    """A prefill engine's side channel from optional, still untyped values.

    Raises:
        ConfigError: a port or size is not a number in range.
    """
    if port is None:
        # Each data-parallel rank of an engine has its own, in their order.
        port = DEFAULT_SIDE_CHANNEL_PORT + (address.dp_rank or 0)
    port_text = str(port)
    if not _is_port(port_text):
        raise ConfigError(
            f"--prefill-side-channel-port got {port_text!r}; "
            "expected a port between 1 and 65535"
        )
    return SideChannel(
        host=kv_host or address.host,
        port=int(port_text),
        engine_id=None if engine_id in (None, "", "auto") else engine_id,
        tp_size=_size("--prefill-tp-size", tp_size),
        pp_size=_size("--prefill-pp-size", pp_size),
    )


def _size(flag: str, value: str | int | None) -> int:
    text = "1" if value is None else str(value)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} got {text!r}; expected a whole number from 1")
    return int(text)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 65535
