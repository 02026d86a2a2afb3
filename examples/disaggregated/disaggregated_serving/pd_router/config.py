# SPDX-License-Identifier: Apache-2.0
"""Command line and configuration of the routers."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT_SIDE_CHANNEL_PORT = 5600
ADMIN_KEY_VARIABLE = "PD_ROUTER_ADMIN_KEY"


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
    """Where a worker's HTTP server listens."""

    host: str
    port: int

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
        return f"http://{self}"

    def __str__(self) -> str:
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


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One engine as configured; push needs a prefill engine's side channel."""

    role: Role
    address: Address
    side_channel: SideChannel | None = None


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
class RouterConfig:
    """All settings of one router process."""

    mode: Mode
    workers: tuple[WorkerSpec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    admin_key: str | None = None
    retries: int = 1
    split_concurrency: int = 16
    max_prompts: int = 1024
    health_interval: float = 2.0
    keep_tool_choice: bool = False
    log_level: str = "info"


def build_parser(mode: Mode) -> argparse.ArgumentParser:
    """The command line of the router of one mode."""
    default = Timeouts()
    parser = argparse.ArgumentParser(
        description=f"OpenAI-compatible router for disaggregated serving ({mode}).",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; %(default)s")
    add("--port", type=int, default=8000, help="port to listen on; %(default)s")
    add("--model", help="the model served: filled in where absent, others get 404")
    for role in Role:
        add(
            f"--{role}",
            nargs="+",
            action="extend",
            default=[],
            metavar="HOST:PORT",
            help=f"{role} engines; repeatable",
        )
    if mode is Mode.PUSH:
        _add_side_channel_flags(parser)
    for name, value, text in (
        ("connect", default.connect, "opening a connection to an engine"),
        ("prefill", default.prefill, "the prefill leg, queueing included"),
        ("first-event", default.first_event, "the decode leg's first event"),
        (
            "idle",
            default.idle,
            "a silent stream or an idle reader; whole answers: first-event + idle",
        ),
        ("drain", default.drain, "running requests after SIGTERM"),
        ("health", default.health, "an engine's answer to a health check"),
    ):
        add(
            f"--{name}-timeout",
            type=_positive_float,
            default=value,
            metavar="SECONDS",
            help=f"longest wait for {text}; %(default)s",
        )
    add(
        "--health-interval",
        type=_positive_float,
        default=2.0,
        metavar="SECONDS",
        help="time between health checks; %(default)s",
    )
    add(
        "--retries",
        type=_natural,
        default=1,
        metavar="N",
        help="further attempts per request; %(default)s",
    )
    add(
        "--split-concurrency",
        type=_positive_int,
        default=16,
        metavar="N",
        help="prompts of one list in flight at once; %(default)s",
    )
    add(
        "--max-prompts",
        type=_positive_int,
        default=1024,
        metavar="N",
        help="longest prompt list; %(default)s",
    )
    add(
        "--keep-tool-choice",
        action="store_true",
        help="send a forced tool_choice to prefill unchanged: for models whose "
        "prompt shows it",
    )
    add(
        "--admin-key",
        metavar="KEY",
        help=f"enables /admin/workers; also read from {ADMIN_KEY_VARIABLE}",
    )
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
    )
    return parser


def parse_args(mode: Mode, argv: Sequence[str] | None = None) -> RouterConfig:
    """Read the command line; exits with a message and status 2 if it is wrong."""
    parser = build_parser(mode)
    args = parser.parse_args(argv)
    # Not the flag's default, which --help would print.
    admin_key = args.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None
    try:
        workers = _worker_specs(mode, args)
        check_workers(workers, need_both=admin_key is None)
    except ConfigError as error:
        parser.error(str(error))
    return RouterConfig(
        mode=mode,
        workers=workers,
        host=args.host,
        port=args.port,
        model=args.model,
        timeouts=Timeouts(
            connect=args.connect_timeout,
            prefill=args.prefill_timeout,
            first_event=args.first_event_timeout,
            idle=args.idle_timeout,
            drain=args.drain_timeout,
            health=args.health_timeout,
        ),
        admin_key=admin_key,
        retries=args.retries,
        split_concurrency=args.split_concurrency,
        max_prompts=args.max_prompts,
        health_interval=args.health_interval,
        keep_tool_choice=args.keep_tool_choice,
        log_level=args.log_level,
    )


def check_workers(workers: Sequence[WorkerSpec], *, need_both: bool) -> None:
    """Refuse sets of workers that cannot serve.

    Raises:
        ConfigError: an address or side channel occurs twice, or a role is empty
            although ``need_both`` is set.
    """
    addresses: dict[Address, Role] = {}
    channels: dict[tuple[str, int], Address] = {}
    for spec in workers:
        if spec.address in addresses:
            raise ConfigError(
                f"{spec.address} is listed as {addresses[spec.address]} and as "
                f"{spec.role}; every engine has one role and is listed once"
            )
        addresses[spec.address] = spec.role
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


def _add_side_channel_flags(parser: argparse.ArgumentParser) -> None:
    for name, metavar, text in (
        ("engine-id", "ID", "engine id, or auto: decode learns it by handshake"),
        ("kv-host", "HOST", "side-channel host; the default is the worker's host"),
        ("side-channel-port", "PORT", "side-channel port; default 5600"),
        ("tp-size", "N", "tensor-parallel size; one value may serve all; default 1"),
        ("pp-size", "N", "pipeline-parallel size; one value may serve all; default 1"),
    ):
        parser.add_argument(
            f"--prefill-{name}",
            nargs="+",
            action="extend",
            metavar=metavar,
            help=f"per --prefill, in the same order: {text}",
        )


def _worker_specs(mode: Mode, args: argparse.Namespace) -> tuple[WorkerSpec, ...]:
    prefill = [Address.parse(text, "--prefill") for text in args.prefill]
    decode = [Address.parse(text, "--decode") for text in args.decode]
    channels: Sequence[SideChannel | None] = [None] * len(prefill)
    if mode is Mode.PUSH:
        channels = _side_channels(prefill, args)
    return tuple(
        [
            WorkerSpec(Role.PREFILL, address, channel)
            for address, channel in zip(prefill, channels, strict=True)
        ]
        + [WorkerSpec(Role.DECODE, address) for address in decode]
    )


def _side_channels(
    prefill: Sequence[Address], args: argparse.Namespace
) -> list[SideChannel]:
    count = len(prefill)
    ids = _per_prefill("engine-id", args.prefill_engine_id, count)
    hosts = _per_prefill("kv-host", args.prefill_kv_host, count)
    ports = _per_prefill("side-channel-port", args.prefill_side_channel_port, count)
    tps = _per_prefill("tp-size", args.prefill_tp_size, count, broadcast=True)
    pps = _per_prefill("pp-size", args.prefill_pp_size, count, broadcast=True)
    return [
        make_side_channel(
            address,
            engine_id=ids[index],
            kv_host=hosts[index],
            port=ports[index],
            tp_size=tps[index],
            pp_size=pps[index],
        )
        for index, address in enumerate(prefill)
    ]


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
    port_text = str(DEFAULT_SIDE_CHANNEL_PORT if port is None else port)
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


def _per_prefill(
    name: str, values: Sequence[str] | None, count: int, *, broadcast: bool = False
) -> Sequence[str | None]:
    if not values:
        return [None] * count
    if len(values) == count:
        return values
    if broadcast and len(values) == 1:
        return list(values) * count
    remedy = "give one value per --prefill, in the same order"
    if broadcast:
        remedy += ", or a single one for all"
    raise ConfigError(
        f"--prefill-{name} has {len(values)} value(s) ({' '.join(values)}) "
        f"for {count} --prefill worker(s); {remedy}"
    )


def _size(flag: str, value: str | int | None) -> int:
    text = "1" if value is None else str(value)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} got {text!r}; expected a whole number from 1")
    return int(text)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= 65535


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return value
