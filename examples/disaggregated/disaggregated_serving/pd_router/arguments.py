# SPDX-License-Identifier: Apache-2.0
"""Command line of the routers."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .config import (
    Address,
    ConfigError,
    ConversationSettings,
    Mode,
    Role,
    RouterConfig,
    SideChannel,
    Timeouts,
    WorkerSpec,
    check_decode_channels,
    check_workers,
    make_side_channel,
)
from .routing import add_routing_flags, natural, positive_float, routing_settings

ADMIN_KEY_VARIABLE = "PD_ROUTER_ADMIN_KEY"


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
    add(
        "--adapter",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="LoRA adapters that all engines have loaded, served beside --model",
    )
    for role in Role:
        add(
            f"--{role}",
            nargs="+",
            action="extend",
            default=[],
            metavar="HOST:PORT[@RANK]",
            help=f"{role} engines; repeatable; @RANK is one data-parallel rank behind "
            "that server",
        )
    if mode is Mode.PUSH:
        _add_push_flags(parser)
    else:
        add(
            "--decode-choice",
            choices=["late", "early"],
            default="late",
            help="choose decode after prefill, or before it as push must, to compare "
            "the two; %(default)s",
        )
    add(
        "--choice-log",
        type=Path,
        metavar="FILE",
        help="append a JSON line for each hand-off: decode's load when the request "
        "came and when prefill had ended, and which engine was chosen",
    )
    _add_report_flags(parser, mode)
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
            type=positive_float,
            default=value,
            metavar="SECONDS",
            help=f"longest wait for {text}; %(default)s",
        )
    add(
        "--health-interval",
        type=positive_float,
        default=2.0,
        metavar="SECONDS",
        help="time between health checks; %(default)s",
    )
    add(
        "--retries",
        type=natural,
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
    add_routing_flags(parser, push=mode is Mode.PUSH)
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
    )
    return parser


def parse_args(mode: Mode, argv: Sequence[str] | None = None) -> RouterConfig:
    """Read the command line; exits with a message and status 2 if it is wrong."""
    parser = build_parser(mode)
    return _config(mode, parser, parser.parse_args(argv))


def parse_multiturn_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """The same for a router that continues conversations."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_mode_flag(first)
    mode = Mode(first.parse_known_args(argv)[0].mode)
    parser = build_parser(mode)
    _add_mode_flag(parser)
    _add_conversation_flags(parser)
    args = parser.parse_args(argv)
    settings = ConversationSettings(
        ttl=args.conversation_ttl,
        max_entries=args.max_conversations,
        sticky_margin=args.sticky_margin,
    )
    return _config(mode, parser, args, settings)


def _config(
    mode: Mode,
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    conversations: ConversationSettings | None = None,
) -> RouterConfig:
    # Not the flag's default, which --help would print.
    if args.adapter and args.model is None:
        parser.error("--adapter needs --model; without it any model is passed on")
    admin_key = args.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None
    try:
        workers = _worker_specs(mode, args)
        check_workers(workers, need_both=admin_key is None)
        if conversations is not None:
            check_decode_channels(workers)
    except ConfigError as error:
        parser.error(str(error))
    return RouterConfig(
        mode=mode,
        workers=workers,
        host=args.host,
        port=args.port,
        model=args.model,
        adapters=tuple(args.adapter),
        timeouts=Timeouts(
            connect=args.connect_timeout,
            prefill=args.prefill_timeout,
            first_event=args.first_event_timeout,
            idle=args.idle_timeout,
            drain=args.drain_timeout,
            health=args.health_timeout,
        ),
        admin_key=admin_key,
        side_channel_token_file=args.side_channel_token_file,
        retries=args.retries,
        split_concurrency=args.split_concurrency,
        max_prompts=args.max_prompts,
        health_interval=args.health_interval,
        keep_tool_choice=args.keep_tool_choice,
        routing=routing_settings(args),
        log_level=args.log_level,
        conversations=conversations,
        choose_early=mode is Mode.PULL and args.decode_choice == "early",
        choice_log=args.choice_log,
    )


def _add_mode_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=[str(mode) for mode in Mode],
        default=str(Mode.PUSH),
        help="the engines' connector: who moves the KV cache; %(default)s. It decides "
        "on other options: see --mode pull --help",
    )


def _add_conversation_flags(parser: argparse.ArgumentParser) -> None:
    default = ConversationSettings()
    parser.add_argument(
        "--conversation-ttl",
        type=positive_float,
        default=default.ttl,
        metavar="SECONDS",
        help="how long an unused conversation is remembered; keep it below the "
        "engines' decoder_kv_blocks_ttl (480 by default); %(default)s",
    )
    parser.add_argument(
        "--max-conversations",
        type=_positive_int,
        default=default.max_entries,
        metavar="N",
        help="beyond it the one used longest ago is forgotten; %(default)s",
    )
    parser.add_argument(
        "--sticky-margin",
        type=natural,
        default=default.sticky_margin,
        metavar="N",
        help="a conversation leaves its decode engine while that one runs more than N "
        "requests above the least loaded one; %(default)s",
    )


def _add_report_flags(parser: argparse.ArgumentParser, mode: Mode) -> None:
    # Push knows the prefill engines' side channels already.
    for role in (Role.DECODE,) if mode is Mode.PUSH else (Role.DECODE, Role.PREFILL):
        parser.add_argument(
            f"--{role}-side-channel",
            nargs="+",
            action="extend",
            metavar="HOST:PORT",
            help=f"per --{role}, in the same order: side channel that is asked why a "
            "hand-off failed"
            + ("; without it nobody is asked" if role is Role.DECODE else ""),
        )
    parser.add_argument(
        "--side-channel-token-file",
        metavar="PATH",
        help="the engines' side_channel_token_file, if they have one",
    )


def _add_push_flags(parser: argparse.ArgumentParser) -> None:
    for name, metavar, text in (
        ("engine-id", "ID", "engine id, or auto: decode learns it by handshake"),
        ("kv-host", "HOST", "side-channel host; the default is the worker's host"),
        ("side-channel-port", "PORT", "side-channel port; default 5600 + @RANK"),
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
    prefill = [Address.parse_worker(text, "--prefill") for text in args.prefill]
    decode = [Address.parse_worker(text, "--decode") for text in args.decode]
    asked = _report_addresses(Role.DECODE, args.decode_side_channel, len(decode))
    specs = [
        WorkerSpec(Role.DECODE, address, report_address=report)
        for address, report in zip(decode, asked, strict=True)
    ]
    if mode is Mode.PUSH:
        return (
            *(
                WorkerSpec(Role.PREFILL, address, channel, channel.address)
                for address, channel in zip(
                    prefill, _side_channels(prefill, args), strict=True
                )
            ),
            *specs,
        )
    asked = _report_addresses(Role.PREFILL, args.prefill_side_channel, len(prefill))
    return (
        *(
            WorkerSpec(Role.PREFILL, address, report_address=report)
            for address, report in zip(prefill, asked, strict=True)
        ),
        *specs,
    )


def _report_addresses(
    role: Role, values: Sequence[str] | None, count: int
) -> list[Address | None]:
    flag = f"--{role}-side-channel"
    return [
        None if text is None else Address.parse(text, flag)
        for text in _per_worker(role, "side-channel", values, count)
    ]


def _side_channels(
    prefill: Sequence[Address], args: argparse.Namespace
) -> list[SideChannel]:
    count = len(prefill)
    role = Role.PREFILL
    ids = _per_worker(role, "engine-id", args.prefill_engine_id, count)
    hosts = _per_worker(role, "kv-host", args.prefill_kv_host, count)
    ports = _per_worker(
        role, "side-channel-port", args.prefill_side_channel_port, count
    )
    tps = _per_worker(role, "tp-size", args.prefill_tp_size, count, broadcast=True)
    pps = _per_worker(role, "pp-size", args.prefill_pp_size, count, broadcast=True)
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


def _per_worker(
    role: Role,
    name: str,
    values: Sequence[str] | None,
    count: int,
    *,
    broadcast: bool = False,
) -> Sequence[str | None]:
    if not values:
        return [None] * count
    if len(values) == count:
        return values
    if broadcast and len(values) == 1:
        return list(values) * count
    remedy = f"give one value per --{role}, in the same order"
    if broadcast:
        remedy += ", or a single one for all"
    raise ConfigError(
        f"--{role}-{name} has {len(values)} value(s) ({' '.join(values)}) "
        f"for {count} --{role} worker(s); {remedy}"
    )


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value
