# SPDX-License-Identifier: Apache-2.0
"""When the transfer thread looks again."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Pace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.rhythm import (
    EAGER_SECONDS,
    LATER_SECONDS,
    MOVING_SECONDS,
    MOVING_SHARE,
    PATIENT_SECONDS,
    RELAXED_SECONDS,
    SOON_SECONDS,
    Rhythm,
)

STEP = 0.000005
"""Length of a step that finds nothing."""

Stepped = tuple[Pace, bool, bool, float]

steps = st.lists(
    st.tuples(st.sampled_from(Pace), st.booleans(), st.booleans(), st.floats(0, 0.05)),
    max_size=30,
)


def _silence(rhythm: Rhythm, pace: Pace, now: float, seconds: float) -> float:
    """Steps in which nothing happens. Returns the time after them."""
    end = now + seconds
    while now < end:
        now += rhythm.wait + STEP
        rhythm.stepped(pace, False, False, now - STEP, now)
    return now


def test_nothing_to_do_is_waited_out() -> None:
    rhythm = Rhythm(0.0)
    assert (rhythm.wait, rhythm.eager) == (RELAXED_SECONDS, False)
    rhythm.stepped(Pace.RELAXED, True, False, 1.0, 1.0 + STEP)
    assert (rhythm.wait, rhythm.eager) == (RELAXED_SECONDS, False)


def test_what_nobody_waits_for_is_looked_after_at_leisure() -> None:
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.LATER, True, False, 1.0, 1.0 + STEP)
    assert (rhythm.wait, rhythm.eager) == (LATER_SECONDS, False)
    assert PATIENT_SECONDS < LATER_SECONDS < RELAXED_SECONDS


def test_what_moves_is_looked_after_without_delay_that_counts() -> None:
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.NOW, True, False, 0.0, STEP)
    assert (rhythm.wait, rhythm.eager) == (MOVING_SECONDS[0], True)
    now = STEP
    for moved in (0.002, 0.01, 0.02):
        now = _silence(rhythm, Pace.NOW, now, moved - now)
        assert MOVING_SECONDS[0] < rhythm.wait <= now * MOVING_SHARE
        assert rhythm.eager
    _silence(rhythm, Pace.NOW, now, 1.0)
    assert (rhythm.wait, rhythm.eager) == (MOVING_SECONDS[1], True)


def test_a_step_that_took_long_is_followed_by_the_next() -> None:
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.NOW, True, False, 0.0, STEP)
    now = _silence(rhythm, Pace.NOW, STEP, 0.1)
    assert rhythm.wait == MOVING_SECONDS[1]
    rhythm.stepped(Pace.NOW, False, False, now, now + 0.01)
    assert rhythm.wait == MOVING_SECONDS[0]


def test_an_order_makes_the_looks_frequent_again() -> None:
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.NOW, True, False, 0.0, STEP)
    now = _silence(rhythm, Pace.NOW, STEP, 0.1)
    rhythm.stepped(Pace.NOW, True, False, now, now + STEP)
    assert rhythm.wait == MOVING_SECONDS[0]


def test_an_answer_is_awaited_eagerly_and_then_with_patience() -> None:
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.SOON, True, False, 0.0, STEP)
    assert (rhythm.wait, rhythm.eager) == (SOON_SECONDS[0], True)
    now = _silence(rhythm, Pace.SOON, STEP, EAGER_SECONDS / 2)
    assert rhythm.eager
    now = _silence(rhythm, Pace.SOON, now, EAGER_SECONDS / 2)
    assert (rhythm.wait, rhythm.eager) == (PATIENT_SECONDS, False)
    rhythm.stepped(Pace.NOW, False, False, now, now + STEP)
    rhythm.stepped(Pace.SOON, False, False, now, now + 2 * STEP)
    assert (rhythm.wait, rhythm.eager) == (SOON_SECONDS[0], True)


def test_a_question_is_looked_for_at_leisure_while_the_forward_thread_computes() -> (
    None
):
    rhythm = Rhythm(0.0)
    rhythm.stepped(Pace.STEADY, True, True, 0.0, STEP)
    assert (rhythm.wait, rhythm.eager) == (LATER_SECONDS, False)
    rhythm.stepped(Pace.STEADY, True, False, 0.0, STEP)
    assert (rhythm.wait, rhythm.eager) == (PATIENT_SECONDS, False)


@given(steps)
def test_no_wait_is_longer_than_its_pace_allows(taken: list[Stepped]) -> None:
    longest = {
        Pace.NOW: MOVING_SECONDS[1],
        Pace.SOON: PATIENT_SECONDS,
        Pace.STEADY: LATER_SECONDS,
        Pace.LATER: LATER_SECONDS,
        Pace.RELAXED: RELAXED_SECONDS,
    }
    rhythm, now = Rhythm(0.0), 0.0
    for pace, ordered, computes, took in taken:
        began = now + rhythm.wait
        now = began + took
        rhythm.stepped(pace, ordered, computes, began, now)
        assert MOVING_SECONDS[0] <= rhythm.wait <= longest[pace]
        assert rhythm.eager or pace is not Pace.NOW
