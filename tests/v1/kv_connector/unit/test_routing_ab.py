# SPDX-License-Identifier: Apache-2.0
"""What the comparison of router settings computes and prints."""

from __future__ import annotations

import argparse
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import routing_ab
from routing_ab import Arm, Done

OPTIONS = argparse.Namespace(
    bursts=2,
    burst_size=8,
    gap=3.0,
    long_share=0.25,
    long_answer=90,
    short_answer=5,
    prompt_tokens=64,
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
    one = routing_ab.bursts(random.Random(1), OPTIONS)
    other = routing_ab.bursts(random.Random(2), OPTIONS)
    assert one == routing_ab.bursts(random.Random(1), OPTIONS)
    assert one != other
    for planned in (one, other):
        first, second = planned[:8], planned[8:]
        for burst in (first, second):
            assert sorted(p.answer_tokens for p in burst) == [5] * 6 + [90] * 2
        assert max(p.at for p in first) < min(p.at for p in second) == 3.0


@given(st.lists(st.floats(0, 100), min_size=1), st.sampled_from([50, 90, 99]))
def test_a_percentile_is_a_value_with_so_many_at_or_below(
    values: list[float], percent: int
) -> None:
    found = routing_ab.percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) >= len(values) * percent / 100
    assert sum(v < found for v in values) < len(values) * percent / 100


def test_ratios_are_those_of_the_same_round() -> None:
    # The machine was twice as slow in the second round.
    rows = [done("a", 0, 1.0), done("b", 0, 0.5), done("a", 1, 2.0), done("b", 1, 1.0)]
    found = routing_ab.compare(rows, ["a", "b"], 50)
    assert found["a"]["ratio"] == 1
    assert (found["b"]["ratio"], found["b"]["least_ratio"]) == (0.5, 0.5)
    assert (found["a"]["least"], found["a"]["greatest"]) == (1.0, 2.0)


def test_a_report_has_every_arm_and_what_was_counted() -> None:
    rows = [
        done(arm, n, 0.1, length) for arm in "ab" for n in (0, 1) for length in (8, 9)
    ]
    counts = {
        "b pd_router_rebinds_total{}": "3.0",
        "a pd_router_rebinds_total{}": "0.0",
    }
    text = "\n".join(routing_ab.report("bursts", rows, ["a", "b"], counts))
    assert "p99 TTFT of a round" in text
    assert "a: all 4 requests: p50 100 ms" in text
    assert "b pd_router_rebinds_total{} 3.0" in text
    assert "a pd_router_rebinds" not in text
    text = "\n".join(routing_ab.report("lengths", rows, ["a", "b"], {}))
    assert "8 tokens" in text
    assert "9 tokens" in text
