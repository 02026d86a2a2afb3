# SPDX-License-Identifier: Apache-2.0
r"""Conversations of growing length, with and without reading back what D keeps.

    python benchmarks/disagg/multiturn.py --output results/multiturn

The settings (P's prefix cache off and on, bidirectional off and on) take turns
within each repetition. Bidirectional is chosen by the requests; the engines are the
same. Without endpoints, engines are started here for one mode after the other.
Each run leaves a JSON file; a summary, a table and a plot are made of all of them.
The exit status is 0 only if every turn was answered, and alike in all settings.

    python benchmarks/disagg/multiturn.py --modes push --model Qwen/Qwen3-32B \
        --prefill-url http://p:8100 --prefill-side-channel p:5600 \
        --decode-url http://d:8200 --decode-side-channel d:5600 \
        --first-tokens 2048 --user-tokens 4096 --token-range 1000 100000

Engines that serve under their own flags need --enable-prompt-tokens-details and
--enable-per-request-metrics for tokens and times of P to be told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / folder)
    for folder in (
        "tools",
        "examples/disaggregated/disaggregated_serving",
        "tests/v1/kv_connector/nixl_integration",
    )
)

from bench_requests import TurnError, new_session
from handoff_engines import engines_lock
from multiturn_engines import BENCH_SPEC, BLOCK_SIZE, engine_config, local_fleet
from multiturn_legs import Address, Endpoint, Mode
from multiturn_plot import plot, table
from multiturn_records import Run, write_json
from multiturn_run import Fleet, run_setting
from multiturn_stats import summary
from multiturn_traffic import (
    Traffic,
    TrafficError,
    in_turn,
    settings,
)
from tiny_model import FIRST_WORD, tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token

MODES: tuple[Mode, ...] = ("push", "pull")
WARM_UP_TURNS = 2
RECOMPUTE_THRESHOLD = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        traffic = _traffic(options)
        remote = _remote_fleet(options)
    except TrafficError as error:
        parser.error(str(error))
    try:
        if remote is not None:
            runs = asyncio.run(_run_fleet(remote, traffic, options, _on_url(options)))
        else:
            runs = _run_locally(traffic, options)
    except TurnError as error:
        print(f"multiturn: {error}", file=sys.stderr)
        return 1
    return _report(runs, options, BLOCK_SIZE if remote is None else options.block_size)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("results/multiturn"), metavar="FOLDER")
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    for option in ("--p-prefix-caching", "--bidirectional"):
        add(option, nargs="+", choices=("off", "on"), default=["off", "on"])
    add("--repetitions", type=int, default=5, metavar="N")
    add("--conversations", type=int, default=1, metavar="N")
    add("--turns", type=int, default=6, metavar="N")
    add("--first-tokens", type=int, default=400, metavar="N")
    add("--user-tokens", type=int, default=328, metavar="N")
    # Just more than the threshold, so that an answer alone is worth reading.
    add("--answer-tokens", type=int, default=72, metavar="N")
    add("--think", type=float, default=1.0, metavar="SECONDS", help="mean")
    add(
        "--token-range",
        nargs=2,
        type=int,
        default=[FIRST_WORD, BENCH_SPEC.vocab],
        metavar=("FIRST", "LAST"),
        help="prompts are random ids of this range, which must hold no special token",
    )
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a request")
    here = parser.add_argument_group("engines on this machine")
    here.add_argument("--model-path", type=Path, help="default: a random Llama")
    here.add_argument("--log-dir", type=Path, help="kept there; default: temporary")
    here.add_argument(
        "--no-lock",
        action="store_true",
        help="do not wait until no other test's engines run on this machine",
    )
    there = parser.add_argument_group("engines that run already")
    there.add_argument("--model", metavar="NAME", help="as it is served")
    for name, text in (
        ("prefill", "P with prefix caching off"),
        ("cached-prefill", "P with prefix caching on"),
        ("decode", "D"),
    ):
        there.add_argument(f"--{name}-url", metavar="URL", help=text)
        there.add_argument(f"--{name}-side-channel", type=_address, metavar="HOST:PORT")
    there.add_argument("--prefill-tp-size", type=int, default=1, metavar="N")
    there.add_argument("--prefill-pp-size", type=int, default=1, metavar="N")
    there.add_argument("--router-url", metavar="URL", help="the multi-turn router's")
    there.add_argument("--token-file", help="the engines' side_channel_token_file")
    there.add_argument("--block-size", type=int, default=16, metavar="N")
    there.add_argument(
        "--no-reset",
        action="store_true",
        help="do not empty the engines' caches before each run, but ask for something "
        "new in each; answers are then not compared",
    )
    return parser


def _traffic(options: argparse.Namespace) -> Traffic:
    if options.repetitions < 1:
        raise TrafficError(
            f"--repetitions is {options.repetitions}, expected at least 1"
        )
    return Traffic(
        options.conversations,
        options.turns,
        options.first_tokens,
        options.user_tokens,
        options.answer_tokens,
        options.think,
        tuple(options.token_range),
        options.seed,
    )


def _remote_fleet(options: argparse.Namespace) -> Fleet | None:
    urls = {
        False: (options.prefill_url, options.prefill_side_channel),
        True: (options.cached_prefill_url, options.cached_prefill_side_channel),
    }
    prefill = {
        caching: Endpoint(
            url.rstrip("/"),
            address,
            options.prefill_tp_size,
            options.prefill_pp_size,
        )
        for caching, (url, address) in urls.items()
        if url
    }
    if not prefill and not options.decode_url and not options.router_url:
        return None
    for option, value in (
        ("--model", options.model),
        ("--prefill-url or --cached-prefill-url", prefill),
        ("--decode-url", options.decode_url),
    ):
        if not value:
            raise TrafficError(f"{option} is missing; engines that run need it")
    if len(options.modes) != 1:
        raise TrafficError(
            "--modes names two; engines that run have one, so run once for each"
        )
    decode = Endpoint(options.decode_url.rstrip("/"), options.decode_side_channel)
    for engine in (*prefill.values(), decode):
        if engine.side_channel is None and not options.router_url:
            raise TrafficError(
                f"the side channel of {engine.url} is missing: give its "
                "--…-side-channel, or a --router-url"
            )
    return Fleet(
        options.modes[0],
        options.model,
        prefill,
        decode,
        options.router_url.rstrip("/") if options.router_url else None,
        Token.load(options.token_file),
        reset=not options.no_reset,
    )


def _run_locally(traffic: Traffic, options: argparse.Namespace) -> list[Run]:
    model = options.model_path or tiny_model(BENCH_SPEC)
    room = -(-traffic.longest_tokens // BLOCK_SIZE) * BLOCK_SIZE
    config = engine_config(model, room)
    caching = _switches(options.p_prefix_caching)
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        log_dir = options.log_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="multiturn-"))
        )
        if not options.no_lock:
            stack.enter_context(engines_lock())
        for mode in options.modes:
            print(f"{mode}: starting engines, logs in {log_dir}", flush=True)
            with local_fleet(mode, config, caching, log_dir) as fleet:
                about = {"model": model.name, "engines": config.arguments()}
                runs += asyncio.run(_run_fleet(fleet, traffic, options, about))
    return runs


async def _run_fleet(
    fleet: Fleet, traffic: Traffic, options: argparse.Namespace, about: dict[str, Any]
) -> list[Run]:
    choices = settings(
        [c for c in _switches(options.p_prefix_caching) if c in fleet.prefill],
        _switches(options.bidirectional),
    )
    about = {**about, "traffic": asdict(traffic), "repetitions": options.repetitions}
    runs = []
    async with new_session(options.timeout) as session:
        warm_up = replace(traffic, turns=min(WARM_UP_TURNS, traffic.turns), think=0)
        for setting in choices:
            # A repetition of its own: nothing of it is asked for again.
            await run_setting(session, fleet, setting, warm_up, -1, 0)
        for repetition in range(options.repetitions):
            for place, setting in enumerate(in_turn(choices, repetition)):
                run = await run_setting(
                    session, fleet, setting, traffic, repetition, place
                )
                run.save(options.output, about)
                runs.append(run)
                _progress(run, options.repetitions)
    return runs


def _progress(run: Run, repetitions: int) -> None:
    print(
        f"{run.mode} {run.repetition + 1}/{repetitions}, {run.setting}: "
        f"{len(run.turns)} turns in {run.seconds:.1f} s",
        flush=True,
    )
    if run.turns:
        turn = run.turns[-1]
        print(
            f"    turn {turn.turn}: {turn.prompt_tokens} prompt tokens, computed "
            f"{turn.tokens_computed}, read {turn.tokens_read}, TTFT "
            f"{turn.ttft * 1000:.0f} ms",
            flush=True,
        )
    for error in run.errors:
        print(f"    FAILED: {error}", flush=True)


def _report(runs: list[Run], options: argparse.Namespace, block_size: int) -> int:
    allowed = block_size + RECOMPUTE_THRESHOLD
    document = summary(runs, allowed)
    write_json(options.output / "summary.json", document)
    if not any(run.turns for run in runs):
        print("multiturn: no turn was answered", file=sys.stderr)
        return 1
    text = table(runs, allowed)
    (options.output / "table.md").write_text(text + "\n", encoding="utf-8")
    plot(runs, options.output / "plot.png")
    print(f"\n{text}\n\nplot and JSON are in {options.output}")
    differing = document["conversations_differing"]
    print(
        f"{len(document['errors'])} turns failed; {differing} of "
        f"{document['conversations_compared']} conversations differ from those of "
        "another setting"
    )
    return 1 if document["errors"] or differing else 0


def _on_url(options: argparse.Namespace) -> dict[str, Any]:
    names = ("prefill_url", "cached_prefill_url", "decode_url", "router_url")
    return {"model": options.model, **{name: getattr(options, name) for name in names}}


def _switches(values: Sequence[str]) -> list[bool]:
    return [value == "on" for value in dict.fromkeys(values)]


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    sys.exit(main())
