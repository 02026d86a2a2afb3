# SPDX-License-Identifier: Apache-2.0
r"""Verifies a running prefill/decode pair, and prints a page about it.

    verify_pd.sh --router http://10.0.0.3:8000
    verify_pd.sh --prefill http://10.0.0.1:8100,10.0.0.1:5600 \
        --decode http://10.0.0.2:8200,10.0.0.2:5600 --drill

Exit status: 0, all checks passed; 1, one failed; 2, none failed but something could
not be checked. It needs aiohttp, msgspec, pyzmq and prometheus_client, and no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(
    str(
        Path(__file__).resolve().parents[2]
        / "examples/disaggregated/disaggregated_serving"
    )
)

from bench_requests import new_session
from pd_router.config import ConfigError
from pd_router.side_channel import Token
from verify_engines import Engine
from verify_http import AskError, Server
from verify_report import render
from verify_result import Report
from verify_run import REACHED, verify
from verify_targets import Settings, discovered, parse_engine, parse_server
from verify_transport import NoLog, check_log

USAGE_ERROR = 2
_DISCOVERY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _parser()
    given = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(given)
    try:
        report = asyncio.run(_report(options))
    except (ConfigError, NoLog) as error:
        print(f"verify_pd: {error}", file=sys.stderr)
        return USAGE_ERROR
    if not any(argument.startswith("--seed") for argument in given):
        given += ["--seed", str(options.seed)]
    report.repeat = f"verify_pd.sh {shlex.join(given)}"
    page = render(report)
    print(page, end="")
    if options.output is not None:
        options.output.write_text(page, encoding="utf-8")
    return report.exit_status


async def _report(options: argparse.Namespace) -> Report:
    try:
        settings = await _settings(options)
    except AskError as error:
        report = Report(title=f"KV hand-off at {options.router}")
        report.add(
            REACHED,
            [str(error)],
            "",
            "Without --prefill and --decode the router is asked for the engines. Is it "
            "started, is the URL the router's and no engine's, and its port open to "
            "this machine? Routers of other projects cannot tell: give both.",
        )
        return report
    return await verify(settings, _say)


def _say(doing: str) -> None:
    """For those who wait; the page alone is on standard output."""
    print(f"verify_pd: {doing}", file=sys.stderr, flush=True)


async def _settings(options: argparse.Namespace) -> Settings:
    file = options.side_channel_token_file
    token = Token.load(file) if file else None
    for log in options.log:
        check_log(log)
    router = _server(options.router, "--router")
    prefill = _engines(options.prefill, "prefill")
    decode = _engines(options.decode, "decode")
    if bool(prefill) != bool(decode) or (router is None and not prefill):
        raise ConfigError("give --router, or both --prefill and --decode, or all three")
    if router is not None and not prefill:
        async with new_session(_DISCOVERY_S) as session:
            prefill, decode = await discovered(session, router)
    return Settings(
        prefill=prefill,
        decode=decode,
        router=router,
        single=_server(options.single, "--single"),
        model=options.model,
        token=token,
        seed=options.seed,
        margin=options.tie_margin,
        strict=options.strict,
        long_tokens=options.long_tokens,
        at_once=options.at_once,
        request_seconds=options.request_timeout,
        settle_seconds=options.settle,
        drill=options.drill,
        drill_seconds=options.drill_settle,
        logs=tuple(options.log),
        expect_backend=options.expect_backend,
        expect_rails=options.expect_rails,
    )


def _server(text: str | None, flag: str) -> Server | None:
    return parse_server(text, flag) if text else None


def _engines(texts: Sequence[str], role: str) -> tuple[Engine, ...]:
    return tuple(parse_engine(text, role) for text in texts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verify_pd.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--router", metavar="URL", help="without it both legs are sent to the engines")
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL[,HOST:PORT]",
            help="an engine, and its side channel; once for each. By default those "
            "that the router tells",
        )
    add("--single", metavar="URL", help="an engine without hand-off, to compare with")
    add("--model", help="as it is served; by default the first that D lists")
    add("--side-channel-token-file", metavar="FILE", help="the engines' own")
    add("--drill", action="store_true", help="drop requests and legs, too")
    add("--strict", action="store_true", help="a near tie is a failure")
    add(
        "--tie-margin",
        type=_positive,
        metavar="NATS",
        help="how far rounding may move a logprob: 0.01 for float32, else 0.25",
    )
    add("--seed", type=int, default=secrets.randbelow(10**6), help="of the prompts")
    add(
        "--long-tokens",
        type=_count,
        default=2048,
        metavar="N",
        help="tokens of the longest prompt",
    )
    add(
        "--at-once",
        type=_count,
        default=8,
        metavar="N",
        help="requests at a time in round two",
    )
    add(
        "--log",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an engine's log, for rails and lanes",
    )
    add("--expect-backend", metavar="NAME", help="fail unless engines have this one")
    add("--expect-rails", type=_count, metavar="N", help="of each rank, by the logs")
    add("--request-timeout", type=_positive, default=120.0, metavar="SECONDS")
    add(
        "--settle",
        type=_positive,
        default=15.0,
        metavar="SECONDS",
        help="within which all blocks must be free",
    )
    add(
        "--drill-settle",
        type=_positive,
        default=60.0,
        metavar="SECONDS",
        help="the same after a fault; more than kv_lease_duration",
    )
    add("--output", type=Path, metavar="FILE", help="where the page is written, too")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
