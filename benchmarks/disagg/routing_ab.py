# SPDX-License-Identifier: Apache-2.0
"""Settings of the router against each other, on the same engines and loads, in turn.

    python routing_ab.py bursts --decode-engines 2 \
        --arm "early=" --arm "rebind=--rebind-after 0.1"
    python routing_ab.py lengths --mode pull \
        --arm "prefill=" --arm "skip=--skip-prefill-below 1000000"

Starts a prefill engine and decode engines on this machine, or stand-ins. Each arm is a
name and the flags of the router that it adds. A round runs every arm once, with a
router of its own and the same lengths and order of prompts; which arm is the first
turns with each round.

``bursts`` sends requests in bursts, a part of them with long answers, in random order.
``uneven`` sends requests at random moments, while streams that do not go through the
router fill one decode engine after the other. ``lengths`` sends one request at a time,
with prompts of each length.

Prints each arm's times to first token, the median over the rounds and their spread, and
ratios to the first arm of the same round. ``--json FILE`` keeps every request.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (
    "tools",
    "examples/disaggregated/disaggregated_serving",
    "tests/v1/kv_connector/nixl_integration",
):
    sys.path.append(str(_ROOT / _folder))

from handoff_engines import engines_lock  # noqa: E402
from multiturn_engines import BENCH_SPEC  # noqa: E402
from pd_launcher import (  # noqa: E402
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    Mode,
    nixl_transfer_config,
)
from pd_processes import stop_all, wait_all_ready  # noqa: E402
from routing_client import BenchError  # noqa: E402
from routing_run import Arm, Comparison  # noqa: E402
from routing_stats import report  # noqa: E402
from stand_in_engines import Pace, StandIns  # noqa: E402
from tiny_model import tiny_model  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.background is None:
        options.background = options.max_num_seqs
    spec = BENCH_SPEC
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="routing-ab-"))
    config = EngineConfig(
        model=str(tiny_model(spec)), max_num_seqs=options.max_num_seqs
    )
    mode: Mode = options.mode
    try:
        with ExitStack() as stack:
            prefill = Engine(
                "prefill",
                replace(
                    config,
                    max_num_seqs=16,
                    transfer_config=nixl_transfer_config(mode, "kv_producer"),
                ),
                log_dir,
            )
            sinks = [
                Engine(
                    f"decode-{number}",
                    replace(
                        config,
                        transfer_config=nixl_transfer_config(mode, "kv_consumer"),
                    ),
                    log_dir,
                )
                for number in range(options.decode_engines)
            ]
            if options.stand_ins:
                pace = Pace(slots=options.max_num_seqs)
                servers = StandIns(
                    prefill.port,
                    [one.port for one in sinks],
                    [one.side_channel_port for one in (prefill, *sinks)],
                    pace,
                )
                servers.start()
                stack.callback(servers.stop)
            else:
                stack.enter_context(engines_lock())
                engines = [prefill, *sinks]
                stack.callback(stop_all, engines)
                for engine in engines:
                    engine.start()
                wait_all_ready(engines, START_TIMEOUT_S)
            comparison = Comparison(options, spec, prefill, sinks, log_dir)
            try:
                comparison.run()
            finally:
                if options.json is not None:
                    _keep(options.json, comparison)
    except (BenchError, TimeoutError) as error:
        print(f"routing_ab: {error}; logs are in {log_dir}", file=sys.stderr)
        return 1
    arms = [arm.name for arm in options.arm]
    for line in report(options.load, comparison.done, arms, comparison.counts):
        print(line)
    return 0


def _keep(path: Path, comparison: Comparison) -> None:
    document: dict[str, Any] = {
        "requests": [asdict(one) for one in comparison.done],
        "counts": comparison.counts,
    }
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("load", choices=("bursts", "uneven", "lengths"))
    add("--arm", type=Arm.parse, action="append", required=True, metavar="NAME=FLAGS")
    add("--mode", choices=("push", "pull"), default="push")
    add(
        "--stand-ins",
        action="store_true",
        help="instead of engines, servers that take as long: the router's part alone",
    )
    add("--rounds", type=int, default=5)
    add("--decode-engines", type=int, default=1)
    add("--max-num-seqs", type=int, default=16, help="of each decode engine")
    add("--seed", default="0")
    add("--bursts", type=int, default=3, help="of a round")
    add("--burst-size", type=int, default=8)
    add("--gap", type=float, default=4.0, help="seconds from one burst to the next")
    add("--long-share", type=float, default=0.5, help="of requests with long answers")
    add("--long-answer", type=int, default=100, help="tokens")
    add("--short-answer", type=int, default=8, help="tokens")
    add("--prompt-tokens", type=int, default=128)
    add("--phases", type=int, default=4, help="of a round of uneven load")
    add("--phase", type=float, default=3.0, help="its length in seconds")
    add("--occupied", type=float, default=2.0, help="seconds of it")
    add("--rate", type=float, default=6.0, help="requests a second, on average")
    add(
        "--background",
        type=int,
        help="streams past the router at one decode engine, by default as many as it "
        "has slots; 0: even load",
    )
    add("--background-answer", type=int, default=400, help="tokens")
    add("--lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024])
    add("--requests", type=int, default=3, help="of each length, in a round")
    add(
        "--beside",
        type=int,
        default=0,
        help="streams of the first decode engine while lengths are measured, whose "
        "longest gap between two tokens is measured as well",
    )
    add("--json", type=Path, metavar="FILE")
    add("--log-dir", type=Path, help="for the servers' logs; a temporary folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
