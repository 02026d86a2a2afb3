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
``lengths`` sends one request at a time, with prompts of each length.

Prints each arm's times to first token, the median over the rounds and their spread, and
ratios to the first arm of the same round. ``--json FILE`` keeps every request.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
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
    ROUTER_START_TIMEOUT_S,
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    Mode,
    Router,
    nixl_transfer_config,
)
from pd_processes import stop_all, wait_all_ready  # noqa: E402
from stand_in_engines import Pace, StandIns  # noqa: E402
from tiny_model import TinySpec, random_prompt, tiny_model  # noqa: E402

REQUEST_TIMEOUT_S = 180.0
PERCENTILES = (50, 90, 99)


class BenchError(RuntimeError):
    """The comparison cannot go on; the text says why."""


@dataclass(frozen=True)
class Arm:
    """A way to run the router."""

    name: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``NAME=FLAGS``.

        Raises:
            argparse.ArgumentTypeError: there is no name.
        """
        name, equals, flags = text.partition("=")
        if not equals or not name:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FLAGS")
        return cls(name, tuple(shlex.split(flags)))


@dataclass(frozen=True)
class Planned:
    """One request, to be sent so many seconds after its load has begun."""

    at: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Done:
    """One request's times, in seconds."""

    arm: str
    round: int
    prompt_tokens: int
    answer_tokens: int
    ttft: float
    total: float


def bursts(rng: random.Random, options: argparse.Namespace) -> list[Planned]:
    """Bursts of requests, of which the same number has long answers in each."""
    planned = []
    for number in range(options.bursts):
        long = round(options.burst_size * options.long_share)
        answers = [options.long_answer] * long
        answers += [options.short_answer] * (options.burst_size - long)
        rng.shuffle(answers)
        for place, answer in enumerate(answers):
            at = number * options.gap + place * 0.01
            planned.append(Planned(at, options.prompt_tokens, answer))
    return planned


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent are not above.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def compare(
    done: Sequence[Done], arms: Sequence[str], percent: float
) -> dict[str, dict[str, float]]:
    """Per arm: the percentile's median over the rounds, their range, and the ratio.

    The ratio to the first arm is the median of those of the single rounds.
    """
    rounds = sorted({one.round for one in done})
    by_round = {
        arm: [
            percentile(
                [d.ttft for d in done if (d.arm, d.round) == (arm, number)], percent
            )
            for number in rounds
        ]
        for arm in arms
    }
    found = {}
    for arm in arms:
        ratios = [
            own / first
            for own, first in zip(by_round[arm], by_round[arms[0]], strict=True)
        ]
        found[arm] = {
            "median": statistics.median(by_round[arm]),
            "least": min(by_round[arm]),
            "greatest": max(by_round[arm]),
            "ratio": statistics.median(ratios),
            "least_ratio": min(ratios),
            "greatest_ratio": max(ratios),
        }
    return found


def table(title: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines to print."""
    lines = [f"{title:<28}{'median':>9}{'least..greatest':>18}{'ratio (range)':>24}"]
    for arm, row in found.items():
        spread = f"{row['least'] * 1e3:.0f}..{row['greatest'] * 1e3:.0f}"
        span = f"{row['least_ratio']:.2f}..{row['greatest_ratio']:.2f}"
        ratio = f"{row['ratio']:.2f} ({span})"
        lines.append(
            f"  {arm:<26}{row['median'] * 1e3:>6.0f} ms{spread:>18}{ratio:>24}"
        )
    return lines


def ask(port: int, prompt: Sequence[int], answer_tokens: int) -> tuple[float, float]:
    """Send one request; seconds to its first token and to its end.

    Raises:
        BenchError: it was not answered in full.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.monotonic()
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BenchError(f"status {response.status}: {response.read(2000)!r}")
        first = None
        for line in response:
            if line.startswith(b'data: {"error"'):
                raise BenchError(f"an error in the stream: {line!r}")
            if first is None and line.startswith(b"data: {"):
                first = time.monotonic() - began
            if line.startswith(b"data: [DONE]") and first is not None:
                return first, time.monotonic() - began
    finally:
        connection.close()
    raise BenchError("the stream ended early")


class Comparison:
    """All rounds of all arms on engines that run."""

    def __init__(
        self,
        options: argparse.Namespace,
        spec: TinySpec,
        prefill: Engine,
        decode: list[Engine],
        log_dir: Path,
    ) -> None:
        self._options = options
        self._spec = spec
        self._engines = prefill, decode
        self._log_dir = log_dir
        self.done: list[Done] = []
        self.moved: dict[str, str] = {}

    def run(self) -> None:
        """Run them."""
        arms = self._options.arm
        for number in range(self._options.rounds):
            turned = number % len(arms)
            for arm in (*arms[turned:], *arms[:turned]):
                self._run_arm(arm, number)
                print(f"round {number + 1}, {arm.name}: done", file=sys.stderr)

    def _run_arm(self, arm: Arm, number: int) -> None:
        prefill, decode = self._engines
        router = Router(
            f"router-{arm.name}-{number}",
            self._options.mode,
            [prefill],
            decode,
            self._log_dir,
            arm.flags,
        )
        try:
            router.start()
            router.wait_ready(ROUTER_START_TIMEOUT_S)
            for _ in range(2 * len(decode)):
                # Not noted: the engines may not know each other yet.
                ask(router.port, self._prompt(self._options.prompt_tokens), 2)
            plan = random.Random(f"{self._options.seed} {number}")
            if self._options.load == "bursts":
                self._together(router, arm, number, bursts(plan, self._options))
            else:
                for length in self._options.lengths:
                    for _ in range(self._options.requests):
                        self._ask(router, arm, number, Planned(0.0, length, 4))
            self._note_counts(router, arm)
        finally:
            router.stop()

    def _together(
        self, router: Router, arm: Arm, number: int, planned: Sequence[Planned]
    ) -> None:
        failures: list[BaseException] = []
        began = time.monotonic()

        def send(one: Planned) -> None:
            time.sleep(max(0.0, began + one.at - time.monotonic()))
            try:
                self._ask(router, arm, number, one)
            except (BenchError, OSError) as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(one,)) for one in planned]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise BenchError(f"{len(failures)} requests failed, as {failures[0]}")

    def _ask(self, router: Router, arm: Arm, number: int, one: Planned) -> None:
        prompt = self._prompt(one.prompt_tokens)
        ttft, total = ask(router.port, prompt, one.answer_tokens)
        self.done.append(
            Done(arm.name, number, one.prompt_tokens, one.answer_tokens, ttft, total)
        )

    def _prompt(self, tokens: int) -> list[int]:
        """A new one, so that no cache has it."""
        return random_prompt(tokens, random.Random(), self._spec)

    def _note_counts(self, router: Router, arm: Arm) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        for line in text.splitlines():
            if line.startswith(("pd_router_rebinds_total{", "pd_router_local_prefill")):
                series, _, value = line.rpartition(" ")
                key = f"{arm.name} {series}"
                self.moved[key] = str(float(self.moved.get(key, 0.0)) + float(value))


def report(
    load: str, done: Sequence[Done], arms: Sequence[str], counts: Mapping[str, str]
) -> list[str]:
    """What the comparison has found, as lines."""
    lines = []
    if load == "bursts":
        for percent in PERCENTILES:
            lines += table(f"p{percent} TTFT of a round", compare(done, arms, percent))
        for arm in arms:
            all_of = [one.ttft for one in done if one.arm == arm]
            shown = ", ".join(
                f"p{percent} {percentile(all_of, percent) * 1e3:.0f} ms"
                for percent in PERCENTILES
            )
            lines.append(f"{arm}: all {len(all_of)} requests: {shown}")
    else:
        for length in sorted({one.prompt_tokens for one in done}):
            some = [one for one in done if one.prompt_tokens == length]
            lines += table(f"{length} tokens, p50 TTFT", compare(some, arms, 50))
    lines += [
        f"{series} {value}"
        for series, value in sorted(counts.items())
        if value != "0.0"
    ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_args(argv)
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
                servers = StandIns(prefill.port, [one.port for one in sinks], pace)
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
    for line in report(options.load, comparison.done, arms, comparison.moved):
        print(line)
    return 0


def _keep(path: Path, comparison: Comparison) -> None:
    document: dict[str, Any] = {
        "requests": [asdict(one) for one in comparison.done],
        "counts": comparison.moved,
    }
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("load", choices=("bursts", "lengths"))
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
    add("--lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024])
    add("--requests", type=int, default=3, help="of each length, in a round")
    add("--json", type=Path, metavar="FILE")
    add("--log-dir", type=Path, help="for the servers' logs; a temporary folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
