# SPDX-License-Identifier: Apache-2.0
"""Runs all arms of a comparison of router settings, in turn, on engines that run."""

from __future__ import annotations

import argparse
import http.client
import math
import random
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pd_launcher import ROUTER_START_TIMEOUT_S, Engine, Router
from routing_client import REQUEST_TIMEOUT_S, Background, BenchError, ask
from routing_loads import Occupied, Planned, arrivals, bursts, occupations
from routing_stats import Done
from tiny_model import TinySpec, random_prompt

_COUNTED = ("pd_router_rebinds_total{", "pd_router_local_prefills_total{")
_FAILED_LEGS = 'pd_router_leg_seconds_count{leg="decode"'


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
        self.counts: dict[str, float] = {}

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
            elif self._options.load == "uneven":
                began = time.monotonic()
                phases = occupations(plan, self._options)
                with self._background(self._options.background).run(phases, began):
                    foreground = arrivals(plan, self._options)
                    self._together(router, arm, number, foreground, began)
            else:
                self._one_by_one(router, arm, number)
            self._note_counts(router, arm)
        finally:
            router.stop()

    def _together(
        self,
        router: Router,
        arm: Arm,
        number: int,
        planned: Sequence[Planned],
        began: float | None = None,
    ) -> None:
        failures: list[BaseException] = []
        began = time.monotonic() if began is None else began

        def send(one: Planned, began: float) -> None:
            time.sleep(max(0.0, began + one.at - time.monotonic()))
            try:
                self._ask(router, arm, number, one)
            except (BenchError, OSError) as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(one, began)) for one in planned]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise BenchError(f"{len(failures)} requests failed, as {failures[0]}")

    def _one_by_one(self, router: Router, arm: Arm, number: int) -> None:
        planned = [
            Planned(0.0, length, 4)
            for length in self._options.lengths
            for _ in range(self._options.requests)
        ]
        if not self._options.beside:
            for one in planned:
                self._ask(router, arm, number, one)
            return
        beside = self._background(self._options.beside)
        began = time.monotonic()
        with beside.run([Occupied(0, 0.0, math.inf)], began):
            while not beside.gaps:
                if time.monotonic() - began > REQUEST_TIMEOUT_S:
                    raise BenchError("no stream has begun beside the requests")
                time.sleep(0.01)
            asked = []
            for one in planned:
                sent = time.monotonic()
                asked.append((sent, self._ask(router, arm, number, one)))
        # A gap is known once it has ended.
        for place, (sent, one_done) in enumerate(asked, len(self.done) - len(asked)):
            gap = beside.longest_gap(sent, sent + one_done.ttft)
            self.done[place] = replace(one_done, gap=gap)

    def _ask(self, router: Router, arm: Arm, number: int, one: Planned) -> Done:
        prompt = self._prompt(one.prompt_tokens)
        ttft, total = ask(router.port, prompt, one.answer_tokens)
        done = Done(arm.name, number, one.prompt_tokens, one.answer_tokens, ttft, total)
        self.done.append(done)
        return done

    def _background(self, streams: int) -> Background:
        options = self._options
        return Background(
            [engine.port for engine in self._engines[1]],
            streams,
            options.background_answer,
            lambda: self._prompt(options.prompt_tokens),
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
            failed = line.startswith(_FAILED_LEGS) and 'result="failed"' in line
            if failed or line.startswith(_COUNTED):
                series, _, value = line.rpartition(" ")
                key = f"{arm.name} {series}"
                self.counts[key] = self.counts.get(key, 0.0) + float(value)
