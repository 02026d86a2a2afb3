# SPDX-License-Identifier: Apache-2.0
"""What the comparison of router settings computes and prints."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import replace

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_processes import free_ports
from pd_router.config import Address
from pd_router.side_channel import SideChannelClient
from routing_client import Background, BenchError, ask
from routing_loads import Occupied, arrivals, bursts, occupations
from routing_run import Arm
from routing_stats import Done, compare, percentile, report
from stand_in_engines import Pace, StandIns

TIMEOUT = aiohttp.ClientTimeout(total=10)

OPTIONS = argparse.Namespace(
    bursts=2,
    burst_size=8,
    gap=3.0,
    long_share=0.25,
    long_answer=90,
    short_answer=5,
    prompt_tokens=64,
    decode_engines=2,
    background=3,
    phases=4,
    phase=3.0,
    occupied=2.0,
    rate=20.0,
)


def done(arm: str, number: int, ttft: float, length: int = 10) -> Done:
    return Done(arm, number, length, 4, ttft, 2 * ttft)


def test_an_arm_is_a_name_and_flags() -> None:
    assert Arm.parse("a=") == Arm("a", ())
    assert Arm.parse("b=--x 1 --y 'two words'") == Arm(
        "b", ("--x", "1", "--y", "two words")
    )
    for text in ("no flags", "=--x"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=FLAGS"):
            Arm.parse(text)


def test_bursts_have_the_same_mixture_in_another_order() -> None:
    one = bursts(random.Random(1), OPTIONS)
    other = bursts(random.Random(2), OPTIONS)
    assert one == bursts(random.Random(1), OPTIONS)
    assert one != other
    for planned in (one, other):
        first, second = planned[:8], planned[8:]
        for burst in (first, second):
            assert sorted(p.answer_tokens for p in burst) == [5] * 6 + [90] * 2
        assert max(p.at for p in first) < min(p.at for p in second) == 3.0


def test_requests_arrive_as_long_as_phases_last() -> None:
    planned = arrivals(random.Random(1), OPTIONS)
    assert planned == arrivals(random.Random(1), OPTIONS)
    assert planned != arrivals(random.Random(2), OPTIONS)
    moments = [one.at for one in planned]
    assert moments == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 12
    assert {one.answer_tokens for one in planned} == {5, 90}


def test_decode_engines_are_occupied_in_turn() -> None:
    found = occupations(random.Random(1), OPTIONS)
    assert [one.begins for one in found] == [0, 3, 6, 9]
    assert [one.ends - one.begins for one in found] == [2.0] * 4
    first = found[0].engine
    assert [one.engine for one in found] == [first, 1 - first] * 2
    even = argparse.Namespace(**{**vars(OPTIONS), "background": 0})
    assert occupations(random.Random(1), even) == []


@given(st.lists(st.floats(0, 100), min_size=1), st.sampled_from([50, 90, 99]))
def test_a_percentile_is_a_value_with_so_many_at_or_below(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) >= len(values) * percent / 100
    assert sum(v < found for v in values) < len(values) * percent / 100


def test_ratios_are_those_of_the_same_round() -> None:
    # The machine was twice as slow in the second round.
    rows = [done("a", 0, 1.0), done("b", 0, 0.5), done("a", 1, 2.0), done("b", 1, 1.0)]
    found = compare(rows, ["a", "b"], 50)
    assert found["a"]["ratio"] == 1
    assert (found["b"]["ratio"], found["b"]["least_ratio"]) == (0.5, 0.5)
    assert (found["a"]["least"], found["a"]["greatest"]) == (1.0, 2.0)


def test_a_report_has_every_arm_and_what_was_counted() -> None:
    rows = [
        done(arm, n, 0.1, length) for arm in "ab" for n in (0, 1) for length in (8, 9)
    ]
    counts = {
        "b pd_router_rebinds_total{}": 3.0,
        "a pd_router_rebinds_total{}": 0.0,
    }
    text = "\n".join(report("bursts", rows, ["a", "b"], counts))
    assert "p99 TTFT of a round" in text
    assert "a: all 4 requests: p50 100 ms" in text
    assert "b pd_router_rebinds_total{} 3" in text
    assert "a pd_router_rebinds" not in text
    text = "\n".join(report("lengths", rows, ["a", "b"], {}))
    assert "8 tokens" in text
    assert "9 tokens" in text
    assert "gap" not in text
    beside = [replace(row, gap=row.prompt_tokens / 100) for row in rows]
    lines = report("lengths", beside, ["a", "b"], {})
    (place,) = [i for i, line in enumerate(lines) if "9 tokens, p50 gap" in line]
    assert "90 ms" in lines[place + 1]


def test_a_gap_counts_where_it_is_in_part_beside_a_request() -> None:
    beside = Background([], 0, 1, lambda: [1])
    beside.gaps = [(1.0, 1.1), (1.1, 1.5), (1.5, 3.5), (3.5, 3.6)]
    assert beside.longest_gap(1.05, 1.2) == pytest.approx(0.4)
    assert beside.longest_gap(1.05, 1.6) == pytest.approx(2.0)
    assert beside.longest_gap(3.55, 9.0) == pytest.approx(0.1)
    with pytest.raises(BenchError, match="no stream ran"):
        beside.longest_gap(3.7, 9.0)


async def test_stand_ins_give_kv_once_and_say_so() -> None:
    prefill, side_channel, first, second = free_ports(4)
    servers = StandIns(
        prefill, [first, second], [side_channel], Pace(decode=0.001, slots=1)
    )
    servers.start()
    told = SideChannelClient()
    address = Address("127.0.0.1", side_channel)
    body = {
        "prompt": [1, 2],
        "max_tokens": 2,
        "kv_transfer_params": {"transfer_id": "t"},
    }
    try:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:

            async def post(port: int) -> str:
                url = f"http://127.0.0.1:{port}/v1/completions"
                async with session.post(url, json=body) as response:
                    return await response.text()

            # Both have asked before the prompt is computed, so both get it.
            asking = [asyncio.create_task(post(port)) for port in (first, second)]
            await asyncio.sleep(0.1)
            assert await told.record(address, "t") is None
            assert not any(task.done() for task in asking)
            await post(prefill)
            for text in await asyncio.gather(*asking):
                assert text.count("data: {") == 2
                assert "error" not in text
            assert await told.record(address, "t") is not None
            assert "error" in await post(first)
    finally:
        told.close()
        servers.stop()


async def test_background_streams_hold_a_stand_in_until_their_phase_ends() -> None:
    prefill, port = free_ports(2)
    servers = StandIns(prefill, [port], [], Pace(decode=0.01, slots=2))
    servers.start()
    try:
        began = time.monotonic()
        background = Background([port], 2, 10_000, lambda: [1])
        with background.run([Occupied(0, 0.0, 0.6)], began):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(ask, port, [1], 1)
            answered = time.monotonic()
        assert answered - began >= 0.6
        assert background.longest_gap(began, answered) > 0
    finally:
        servers.stop()
