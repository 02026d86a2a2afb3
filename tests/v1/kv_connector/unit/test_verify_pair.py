# SPDX-License-Identifier: Apache-2.0
"""A verification finds each fault of a pair, and says what to do; and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import verify_drill
import verify_pd
from bench_requests import new_session
from pd_router.config import Address
from pd_router.side_channel import Token
from v1.kv_connector.unit.verify_pair import (
    BLOCK_BYTES,
    REGIONS,
    FakePair,
    fake_pair,
)
from verify_engines import Engine
from verify_http import Server, get_page
from verify_judgement import ANSWERS
from verify_report import render
from verify_result import Check, Report, Status
from verify_run import BLOCKS, MOVED, REACHED, REFERENCE, SIDE_CHANNELS, verify
from verify_targets import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token as EngineToken

SCRIPT = Path(verify_pd.__file__).with_name("verify_pd.sh")
SETTLE_S = 20.0
"""Not waited for where all goes well."""
IN_VAIN_S = 0.5
"""Where a test waits for what does not come."""


BOTH_MODES = pytest.mark.parametrize("mode", ["push", "pull"])


@pytest.fixture
def mode() -> str:
    return "push"


@pytest_asyncio.fixture
async def pair(mode: str) -> AsyncIterator[FakePair]:
    async with fake_pair(mode) as running:
        yield running


def settings(pair: FakePair, *, router: bool = True, **more: Any) -> Settings:
    def engine(role: str, url: str, port: int) -> Engine:
        return Engine(role, Server(url), Address("127.0.0.1", port))

    chosen = Settings(
        (engine("prefill", pair.prefill.url, pair.prefill.channel),),
        (engine("decode", pair.decode.url, pair.decode.channel),),
        router=Server(pair.router_url) if router else None,
        long_tokens=512,
        settle_seconds=SETTLE_S,
        drill_seconds=SETTLE_S,
    )
    return replace(chosen, **more)


def check(report: Report, name: str) -> Check:
    (found,) = [one for one in report.checks if one.name == name]
    return found


def failed(report: Report) -> set[str]:
    return {one.name for one in report.checks if one.status is Status.FAIL}


@BOTH_MODES
async def test_drill_comes_sooner_where_it_was_too_late(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_drill, "CUT_AT", 3.0)
    report = await verify(settings(pair, drill=True))
    assert report.exit_status == 0, render(report)


@BOTH_MODES
@pytest.mark.parametrize("router", [True, False], ids=["router", "legs"])
async def test_sound_pair_passes(pair: FakePair, router: bool) -> None:
    report = await verify(settings(pair, router=router, drill=True))

    page = render(report)
    assert report.exit_status == 0, page
    assert {one.status for one in report.checks} == {Status.PASS}
    assert len([one for one in report.checks if one.name.startswith("drill")]) == 4
    assert "alone computed all 2,058 tokens" in check(report, REFERENCE).said
    moved = {row.kind: row for row in report.moved}
    assert set(moved) == {
        "short", "one block", "across block edges", "long", "repeated prefix",
        "multi-turn",
    }  # fmt: skip
    assert moved["one block"].bytes == 2 * BLOCK_BYTES
    assert moved["one block"].pages == 2 * REGIONS
    assert page.startswith("# KV hand-off at http://127.0.0.1:")
    assert page.splitlines()[0].endswith(": PASS")


@BOTH_MODES
async def test_single_engine_is_the_reference(pair: FakePair) -> None:
    asked = pair.decode.sources["local_compute"]

    report = await verify(settings(pair, single=Server(pair.prefill.url)))

    assert report.exit_status == 0, render(report)
    assert f"the single engine {pair.prefill.url}" in check(report, REFERENCE).said
    nudges = 20
    assert pair.decode.sources["local_compute"] - asked < nudges


@pytest.mark.parametrize("spoilt", ["wrong", "off"])
async def test_wrong_answers_fail(pair: FakePair, spoilt: str) -> None:
    pair.faults.answer = spoilt
    pair.faults.only_of = 400

    report = await verify(settings(pair))

    assert failed(report) == {ANSWERS}
    assert report.exit_status == 1
    found = check(report, ANSWERS)
    assert found.said == "4 of 30 answers are wrong or missing"
    assert any(d.startswith("long 1, one by one: token 1 ") for d in found.details)
    assert "P alone gives the reference's answer: it is the KV handed over" in (
        found.details
    )
    assert found.remedy in render(report)


async def test_engines_that_differ_are_told_apart(pair: FakePair) -> None:
    pair.faults.answer = "wrong"
    pair.faults.unlike_alone = True

    report = await verify(settings(pair))

    details = check(report, ANSWERS).details
    assert any(line.startswith("P alone differs") for line in details), details


async def test_near_ties_are_told_and_strict_refuses_them(pair: FakePair) -> None:
    pair.faults.answer = "tie"
    pair.faults.only_of = 400

    report = await verify(settings(pair))

    assert report.exit_status == 0, render(report)
    assert "4 differ by a near tie only" in check(report, ANSWERS).said
    assert "long 1, one by one: token 1 is" in render(report)

    strict = await verify(settings(pair, strict=True))

    assert failed(strict) == {ANSWERS}


async def test_many_near_ties_fail(pair: FakePair) -> None:
    pair.faults.answer = "tie"

    report = await verify(settings(pair))

    assert failed(report) == {ANSWERS}
    assert check(report, ANSWERS).said == "30 of 30 near ties are no chance"


async def test_difference_without_logprobs_fails(pair: FakePair) -> None:
    pair.faults.answer = "tie"
    pair.faults.only_of = 400
    pair.faults.tells_logprobs = False

    report = await verify(settings(pair))

    assert failed(report) == {ANSWERS}


async def test_silent_recomputation_fails(pair: FakePair) -> None:
    pair.faults.recompute = True

    report = await verify(settings(pair, settle_seconds=IN_VAIN_S))

    assert MOVED in failed(report)
    assert ANSWERS not in failed(report)
    assert "their prompts were computed again" in check(report, MOVED).said
    assert report.exit_status == 1


async def test_silent_recomputation_fails_without_side_channels(
    pair: FakePair,
) -> None:
    pair.faults.recompute = True
    chosen = settings(pair, settle_seconds=IN_VAIN_S)
    bare = [replace(e, side_channel=None) for e in (*chosen.prefill, *chosen.decode)]

    report = await verify(replace(chosen, prefill=(bare[0],), decode=(bare[1],)))

    assert MOVED in failed(report)


async def test_recomputation_of_some_fails(pair: FakePair) -> None:
    chosen = settings(pair, settle_seconds=IN_VAIN_S)

    async def change_in_the_middle() -> None:
        while len(pair.decode.records) < 5:
            await asyncio.sleep(0.005)
        pair.faults.recompute = True

    change = asyncio.create_task(change_in_the_middle())
    report = await verify(chosen)
    await change

    found = check(report, MOVED)
    assert found.status is Status.FAIL
    assert "have no hand-off on D" in found.said


async def test_reference_from_a_cache_is_no_reference(pair: FakePair) -> None:
    chosen = settings(pair, seed=3)
    pair.faults.cached = True
    await verify(chosen)

    report = await verify(chosen)

    assert check(report, REFERENCE).status is Status.UNKNOWN
    assert report.exit_status == 2


async def test_engines_that_do_not_tell_sources(pair: FakePair) -> None:
    pair.faults.tells_sources = False

    report = await verify(settings(pair))

    assert report.exit_status == 2
    assert check(report, REFERENCE).status is Status.UNKNOWN
    assert check(report, MOVED).status is Status.PASS


async def test_failed_hand_offs_fail(pair: FakePair) -> None:
    pair.faults.fails = True

    report = await verify(settings(pair))

    assert ANSWERS in failed(report)
    # After three failures nothing more is asked.
    page = render(report)
    assert "were not asked after others had failed" in page
    assert re.search(r"D says of \d+ of them: failed: the model differs", page)
    # Where nothing was answered there is no answer to compare.
    assert "P alone" not in page
    assert "circuit_open" in check(report, ANSWERS).remedy


async def test_side_channels_that_are_mixed_up_are_asked_about(pair: FakePair) -> None:
    pair.faults.fails = True
    chosen = settings(pair)
    prefill, decode = chosen.prefill[0], chosen.decode[0]
    mixed = replace(
        chosen,
        prefill=(replace(prefill, side_channel=decode.side_channel),),
        decode=(replace(decode, side_channel=prefill.side_channel),),
    )

    page = render(await verify(mixed))

    assert "is it D's, and not P's?" in page


@pytest.mark.parametrize("channels", [True, False])
async def test_kept_turns_are_not_held(pair: FakePair, channels: bool) -> None:
    pair.decode.kept = 30
    chosen = settings(pair)
    if not channels:
        bare = [
            replace(e, side_channel=None) for e in (*chosen.prefill, *chosen.decode)
        ]
        chosen = replace(chosen, prefill=(bare[0],), decode=(bare[1],))

    report = await verify(chosen)

    assert report.exit_status == 0, render(report)
    assert "but for 30 blocks kept for later turns" in check(report, BLOCKS).said


async def test_what_earlier_requests_hold_is_waited_for(pair: FakePair) -> None:
    async def lease() -> None:
        await asyncio.sleep(IN_VAIN_S)
        pair.prefill.held -= 7

    pair.prefill.held += 7
    said: list[str] = []
    ending = asyncio.create_task(lease())
    report = await verify(settings(pair, settle_seconds=0.3), said.append)
    await ending

    assert report.exit_status == 0, render(report)
    assert said[0] == f"waiting until nothing is held, {SETTLE_S:g} s at most"


async def test_streams_are_read_to_their_end(pair: FakePair) -> None:
    report = await verify(settings(pair))

    assert report.exit_status == 0, render(report)
    async with new_session(SETTLE_S) as session:
        page = await get_page(session, f"{pair.router_url}/metrics")
    assert 'outcome="ok"' in page
    assert 'outcome="client_disconnect"' not in page


async def test_blocks_that_stay_held_fail(pair: FakePair) -> None:
    pair.prefill.held = 7

    report = await verify(
        settings(pair, settle_seconds=IN_VAIN_S, drill_seconds=IN_VAIN_S)
    )

    assert failed(report) == {BLOCKS}
    said = f"prefill {pair.prefill.url}: 93 of 100 blocks are free, held by "
    assert check(report, BLOCKS).said.startswith(said)
    assert "exposed_for_send" in check(report, BLOCKS).said


async def test_blocks_that_stay_held_fail_without_side_channels(
    pair: FakePair,
) -> None:
    pair.prefill.held = 7
    chosen = settings(pair, settle_seconds=IN_VAIN_S, drill_seconds=IN_VAIN_S)
    bare = [replace(e, side_channel=None) for e in (*chosen.prefill, *chosen.decode)]

    report = await verify(replace(chosen, prefill=(bare[0],), decode=(bare[1],)))

    assert failed(report) == {BLOCKS}
    assert "kv_cache_usage_perc is 0.07" in check(report, BLOCKS).said


async def test_drill_finds_blocks_that_an_abort_leaves_held(pair: FakePair) -> None:
    pair.faults.leak = True

    report = await verify(settings(pair, drill=True, drill_seconds=IN_VAIN_S))

    assert failed(report)
    assert all(name.startswith("drill: ") for name in failed(report))
    assert any("blocks are free" in one.said for one in report.checks)


async def test_drill_finds_an_engine_that_dies(pair: FakePair) -> None:
    pair.faults.die = True

    report = await verify(settings(pair, drill=True, drill_seconds=IN_VAIN_S))

    last = report.checks[-1]
    assert failed(report) == {last.name}
    assert last.name.startswith("drill")
    assert any(f"{pair.decode.url}/health did not answer" in d for d in last.details)
    # Nothing more is tried on a dead engine.
    assert len([one for one in report.checks if one.name.startswith("drill")]) < 4


async def test_router_that_cannot_be_reached_fails(pair: FakePair) -> None:
    await pair.stop_router()

    report = await verify(settings(pair))

    assert failed(report) == {REACHED}
    assert "router" in check(report, REACHED).said
    # The engines are verified all the same.
    assert check(report, ANSWERS).status is Status.PASS


async def test_engine_that_cannot_be_reached_fails(pair: FakePair) -> None:
    await pair.decode.stop()

    report = await verify(settings(pair))

    assert [one.name for one in report.checks] == [REACHED]
    assert report.exit_status == 1
    assert check(report, REACHED).said.endswith("did not answer: connection refused")


async def test_side_channel_that_does_not_answer_is_told(pair: FakePair) -> None:
    chosen = settings(pair)
    elsewhere = replace(chosen.decode[0], side_channel=Address("127.0.0.1", 9))

    report = await verify(replace(chosen, decode=(elsewhere,)))

    assert report.exit_status == 2
    assert check(report, MOVED).status is Status.PASS


async def test_side_channels_are_asked_with_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a secret of some length\n")

    async with fake_pair("push", EngineToken.load(str(file))) as pair:
        told = await verify(settings(pair, token=Token.load(str(file))))
        untold = await verify(settings(pair))

    assert told.exit_status == 0, render(told)
    assert all(row.bytes for row in told.moved)
    assert check(untold, SIDE_CHANNELS).status is Status.UNKNOWN
    assert check(untold, MOVED).status is Status.PASS


async def test_refused_requests_are_no_failure(pair: FakePair) -> None:
    pair.faults.refuses = True

    report = await verify(settings(pair))

    assert report.exit_status == 2
    assert "answered 400" in report.checks[-1].said


async def test_wrong_backend_and_rails_fail(pair: FakePair, tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    log.write_text(
        "x Rail Manager created with 16 rails\n" * 3 + "Rail Manager "
        "created with 2 rails\nGPU 0 mapped to rail 4\n"
    )

    report = await verify(
        settings(pair, expect_backend="LIBFABRIC", expect_rails=16, logs=(log,))
    )

    assert failed(report) == {"NIXL backend", "rails and lanes in the logs"}
    assert "runs over UCX, expected LIBFABRIC" in check(report, "NIXL backend").said
    rails = check(report, "rails and lanes in the logs").said
    assert "1 rank(s) with 2 rails, 3 rank(s) with 16 rails" in rails


async def test_lanes_of_ucx_are_shown(pair: FakePair, tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    log.write_text(
        "[1.2] [vm:1 :0] ucp_worker.c:1 UCX  INFO  me self cfg#0 am(tcp/lo)\n"
        "[1.2] [vm:1 :0] ucp_worker.c:1 UCX  INFO  me intra-node cfg#1 "
        "rma_am(tcp/lo)  am(tcp/lo cma/memory)\n"
    )

    report = await verify(settings(pair, logs=(log,)))

    assert report.exit_status == 0, render(report)
    found = check(report, "rails and lanes in the logs")
    assert found.details == ("intra-node: rma_am(tcp/lo) am(tcp/lo cma/memory)",)


async def test_log_without_rails_is_not_checked(pair: FakePair, tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    log.write_text("nothing of the kind\n")

    report = await verify(settings(pair, logs=(log,)))

    assert report.exit_status == 2


# ---- as users run it


async def _script(
    *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


async def test_script_finds_the_engines_behind_a_router(
    pair: FakePair, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"

    done = await _script(
        "--router", pair.router_url, "--output", str(page), "--long-tokens", "512"
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text() == done.stdout
    assert pair.prefill.url in done.stdout
    assert "--seed " in done.stdout


async def test_script_takes_engines_from_the_kits_variables(pair: FakePair) -> None:
    done = await _script(
        "--long-tokens",
        "512",
        DEVICE="cpu",
        PREFILL_PORT=str(pair.prefill.address.port),
        DECODE_PORT=str(pair.decode.address.port),
        PREFILL_SIDE_CHANNEL_PORT=str(pair.prefill.channel),
        DECODE_SIDE_CHANNEL_PORT=str(pair.decode.channel),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "both legs sent straight" in done.stdout


async def test_script_says_that_the_router_is_down(pair: FakePair) -> None:
    await pair.stop_router()

    done = await _script("--router", pair.router_url)

    assert done.returncode == 1
    assert "did not answer" in done.stdout
    assert "give both" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prefill", "http://127.0.0.1:1"),
        ("--router", "somewhere"),
        ("--router", "http://127.0.0.1:1", "--log", "/none"),
        ("--router", "http://127.0.0.1:1", "--side-channel-token-file", "/none"),
    ],
)
def test_unusable_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(SCRIPT), *arguments],
        env={k: v for k, v in os.environ.items() if not k.endswith("_IP")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr.startswith(("verify_pd", "usage: "))
