# SPDX-License-Identifier: Apache-2.0
"""Early and late choices of decode under uneven load, as the choice log has them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import late_choice
from pd_router.arguments import parse_args, parse_multiturn_args
from pd_router.config import Mode
from router_backends import (
    DONE,
    FAST,
    Cluster,
    Got,
    Script,
    Seen,
    answers,
    hangs,
    prefill_answer,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

OK_PREFILL = answers(prefill_answer())
OK_DECODE = streams(token("a"), DONE)


class Stage:
    """Two decode engines whose requests end when they are told to."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self.cluster = cluster
        self.log = log
        self._decoded: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._prefilled: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._asked: dict[str, asyncio.Task[Got]] = {}

    async def start(self, mode: str, *, early: bool) -> None:
        gated = self._gated(self._decoded, OK_DECODE)
        prefill = self._gated(self._prefilled, OK_PREFILL)
        await self.cluster.start(
            mode, prefill, [gated, gated], choice_log=self.log, choose_early=early
        )

    async def ask(self, prompt: str, *, prefill: bool = True) -> None:
        """Send a request and wait for where it waits itself."""
        if prefill:
            self._prefilled[prompt].set()
        body = {"prompt": prompt, "stream": True, "max_tokens": 3}
        self._asked[prompt] = asyncio.create_task(self.cluster.post(body))
        engines = self.cluster.decode if prefill else self.cluster.prefill
        await self._until(
            lambda: any(s.body["prompt"] == prompt for e in engines for s in e.seen)
        )

    async def finish(self, *prompts: str) -> None:
        """Let requests end."""
        for prompt in prompts:
            self._prefilled[prompt].set()
            self._decoded[prompt].set()
            assert (await self._asked[prompt]).status == 200
        # The router lets go of a leg a moment after its client has the answer.
        await self._until(
            lambda: (
                sum(1 for task in self._asked.values() if not task.done())
                == sum(w.outstanding for w in self._decode_workers())
                + self._without_decode()
            )
        )

    def on(self, number: int) -> list[str]:
        """The prompts that a decode engine has got."""
        return [seen.body["prompt"] for seen in self.cluster.decode[number].seen]

    def name(self, number: int) -> str:
        return str(self.cluster.decode[number].address)

    def line(self, prompt: str) -> dict[str, Any]:
        """What the log has of a request."""
        (transfer_id,) = (
            seen.params["transfer_id"]
            for seen in self.cluster.prefill[0].seen
            if seen.body["prompt"] == prompt
        )
        lines = map(json.loads, self.log.read_text().splitlines())
        (line,) = (one for one in lines if one["transfer_id"] == transfer_id)
        assert isinstance(line, dict)
        return line

    def _decode_workers(self) -> list[Any]:
        return [w for w in self.cluster.router.workers if w.role == "decode"]

    def _without_decode(self) -> int:
        config = self.cluster.router.config
        if config.mode is Mode.PUSH or config.choose_early:
            return 0
        prefilling = (p for p, task in self._asked.items() if not task.done())
        return sum(not self._prefilled[prompt].is_set() for prompt in prefilling)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    @staticmethod
    def _gated(gates: dict[str, asyncio.Event], script: Script) -> Script:
        async def gated(seen: Seen) -> web.StreamResponse:
            await gates[seen.body["prompt"]].wait()
            return await script(seen)

        return gated


@pytest.mark.parametrize(
    ("mode", "early"), [("push", False), ("pull", True), ("pull", False)]
)
async def test_a_choice_that_load_has_overtaken_is_noted(
    cluster: Cluster, tmp_path: Path, mode: str, early: bool
) -> None:
    stage = Stage(cluster, tmp_path / "choices.jsonl")
    await stage.start(mode, early=early)
    chooses_early = early or mode == "push"
    await stage.ask("long")
    await stage.ask("watched", prefill=False)
    # While it is prefilled the other D gets free, and the one chosen early gets work.
    await stage.ask("second")
    await stage.ask("third")
    first = [prompt for prompt in stage.on(0) if prompt != "watched"]
    second = [prompt for prompt in stage.on(1) if prompt != "watched"]
    assert "long" in first
    await stage.finish(*first)

    await stage.finish("watched")

    await stage.finish(*second)
    line = stage.line("watched")
    assert line["mode"] == mode
    assert line["early"]["loads"] == {stage.name(0): 1, stage.name(1): 0}
    assert line["early"]["choice"] == stage.name(1)
    # Without its own leg, which push and early pull have at the second one already.
    assert line["late"]["loads"] == {stage.name(0): 0, stage.name(1): 1}
    assert line["late"]["choice"] == stage.name(0)
    assert line["chosen"] == stage.name(1 if chooses_early else 0)
    assert ("watched" in stage.on(1)) is chooses_early
    seconds = line["seconds"]
    assert seconds["prefilled"] > 0
    assert 0 < seconds["answered"] <= seconds["finished"]

    found = late_choice.summary(late_choice.load(stage.log))
    assert (found["handoffs"], found["decode_engines"]) == (4, 2)
    assert (found["differing"], found["share_differing"]) == (1, 0.25)
    assert found["median_excess_requests"] == found["greatest_excess_requests"] == 1


async def test_equal_loads_do_not_differ(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "choices.jsonl"
    await cluster.start("push", OK_PREFILL, [OK_DECODE, OK_DECODE], choice_log=log)
    for _ in range(3):
        assert (await cluster.post({"prompt": "p", "stream": True})).status == 200
    await cluster.quiet()

    choices = late_choice.load(log)

    assert len(choices) == 3
    # They alternate, and neither has other work.
    assert len({choice.chosen for choice in choices}) == 2
    assert not any(choice.differs for choice in choices)


async def test_a_request_that_was_not_prefilled_is_not_noted(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "choices.jsonl"
    await cluster.start("pull", answers({}, status=400), OK_DECODE, choice_log=log)
    assert (await cluster.post({"prompt": "p"})).status == 400
    await cluster.quiet()
    assert late_choice.load(log) == []


async def test_early_pull_holds_its_decode_engine_while_it_prefills(
    cluster: Cluster,
) -> None:
    await cluster.start("pull", hangs(), OK_DECODE, timeouts=FAST, choose_early=True)
    asking = asyncio.create_task(cluster.post({"prompt": "p"}))
    await cluster.prefill[0].request()
    (decode,) = (w for w in cluster.router.workers if w.role == "decode")
    assert decode.outstanding == 1
    # A client that leaves frees it again.
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await cluster.quiet()
    assert decode.outstanding == 0


async def test_the_flags_reach_the_router(tmp_path: Path) -> None:
    both = ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    log = tmp_path / "choices.jsonl"

    plain = parse_args(Mode.PULL, both)
    early = parse_args(
        Mode.PULL, [*both, "--decode-choice", "early", "--choice-log", str(log)]
    )
    push = parse_args(Mode.PUSH, [*both, "--choice-log", str(log)])

    assert (plain.choose_early, plain.choice_log) == (False, None)
    assert (early.choose_early, early.choice_log) == (True, log)
    assert (push.choose_early, push.choice_log) == (False, log)
    multiturn = parse_multiturn_args(
        [*both, "--decode-side-channel", "127.0.0.1:3", "--choice-log", str(log)]
    )
    assert multiturn.choice_log == log
    with pytest.raises(SystemExit):
        parse_args(Mode.PUSH, [*both, "--decode-choice", "early"])


# ---- the analysis


def line(wait: float, loads: tuple[float, float], early: str = "a") -> str:
    return json.dumps(
        {
            "mode": "push",
            "transfer_id": "t",
            "chosen": early,
            "early": {"choice": early, "loads": {"a": 0, "b": 0}},
            "late": {"choice": "b", "loads": dict(zip("ab", loads, strict=True))},
            "seconds": {"prefilled": 1.0, "answered": 1.0 + wait, "finished": 5 + wait},
        }
    )


async def test_what_choosing_early_cost_is_a_ratio_of_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    early.write_text(
        "\n".join([line(0.6, (3, 1)), line(0.9, (2, 0)), line(0.3, (1, 1))])
    )
    late.write_text("\n".join([line(0.2, (0, 1)), line(0.2, (1, 1)), '{"mode": "pu']))

    assert late_choice.main([str(early), str(late)]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["first"]["differing"] == 2
    assert document["first"]["median_excess_requests"] == 2
    assert document["first"]["decode_wait_differing"] == pytest.approx(0.75)
    assert document["first"]["decode_wait_same"] == pytest.approx(0.3)
    assert document["second"]["differing"] == 0
    assert document["cost"]["decode_wait_early_over_late"] == pytest.approx(3.0)
    assert document["cost"]["decoding_early_over_late"] == pytest.approx(1.0)


async def test_a_log_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_text(f"{{}}\n{line(0.1, (0, 0))}\n")

    assert late_choice.main([str(path)]) == 2

    assert "line 1: not what --choice-log writes" in capsys.readouterr().err
