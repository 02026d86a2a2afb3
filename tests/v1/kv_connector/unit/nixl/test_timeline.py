# SPDX-License-Identifier: Apache-2.0
"""What is read from the stamps of a hand-off."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import (
    PHASES,
    TOTAL,
    WAITING,
    Role,
    Stage,
    Stamps,
    Timeline,
    Wait,
    durations,
)

COMPUTE, COORDINATION = WAITING[Wait.COMPUTE], WAITING[Wait.COORDINATION]


def _sent(**changed: float) -> Timeline:
    """P's view: D has registered before the prefill ended."""
    at = {
        Stage.PREFILL_STARTED: 101.0,
        Stage.REGISTERED: 101.5,
        Stage.FIRST_POSTED: 102.0,
        Stage.PREFILL_ENDED: 104.0,
        Stage.LAST_POSTED: 104.25,
        Stage.WRITTEN: 105.0,
        Stage.RELEASED: 106.0,
        **{Stage(name): value for name, value in changed.items()},
    }
    timeline = Timeline(100.0, 1e9)
    for stage, moment in at.items():
        timeline.mark(stage, moment)
    return timeline


def test_a_sender_that_was_asked_in_time_waits_for_its_own_computation() -> None:
    assert _sent().durations(Role.SENDER) == {
        "queue": 1.0,
        "prefill": 3.0,
        "claim": 0.0,
        "post": 0.25,
        "transfer": 0.75,
        "release": 1.0,
        COMPUTE: 4.0,
        COORDINATION: 1.25,
        TOTAL: 6.0,
    }


def test_a_sender_that_is_asked_late_waits_for_the_other_engine() -> None:
    late = _sent(registered=104.2).durations(Role.SENDER)
    assert late["claim"] == pytest.approx(0.2)
    assert late["post"] == pytest.approx(0.05)
    assert late[COMPUTE] == 4.0


def test_a_claim_may_come_before_its_prefill_request() -> None:
    early = _sent(registered=99.0)
    assert early.durations(Role.SENDER) == _sent().durations(Role.SENDER)
    assert early.offsets()[Stage.REGISTERED] == -1.0


def _received() -> Timeline:
    timeline = Timeline(10.0, 1e9)
    for seconds, stage in enumerate(
        (
            Stage.REGISTERED,
            Stage.ASKED,
            Stage.ANSWERED,
            Stage.FIRST_NOTIFICATION,
            Stage.LAST_NOTIFICATION,
            Stage.FIRST_STEP,
        ),
        start=1,
    ):
        timeline.mark(stage, 10.0 + seconds)
    return timeline


def test_a_receiver_waits_for_computation_until_the_last_chunk_begins_to_come() -> None:
    timeline = _received()
    timeline.mark(Stage.PREFILL_ENDED, 14.75)
    found = timeline.durations(Role.RECEIVER)
    assert (found["prefill_wait"], found["transfer"]) == (1.75, 0.25)
    assert (found[COMPUTE], found[COORDINATION], found[TOTAL]) == (2.75, 3.0, 6.0)


def test_a_receiver_that_saw_no_last_chunk_counts_all_as_computation() -> None:
    found = _received().durations(Role.RECEIVER)
    assert (found["prefill_wait"], found["transfer"]) == (2.0, 0.0)


def test_what_is_not_known_is_left_out() -> None:
    timeline = Timeline(0.0, 1e9)
    assert timeline.durations(Role.SENDER) == {}
    timeline.mark(Stage.PREFILL_STARTED, 1.0)
    timeline.mark(Stage.WRITTEN, 5.0)
    timeline.mark(Stage.RELEASED, 6.0)
    assert timeline.durations(Role.SENDER) == {"queue": 1.0, "release": 1.0}


def test_parts_start_with_the_first_and_end_with_the_last() -> None:
    one, other = Stamps(), Stamps()
    for stamps, moments in ((one, (1.0, 4.0)), (other, (2.0, 3.0))):
        stamps.mark(Stage.FIRST_POSTED, moments[0])
        stamps.mark(Stage.WRITTEN, moments[1])
        stamps.chunks = 2
    for order in ((one, other), (other, one)):
        timeline = Timeline(0.0, 1e9)
        for stamps in order:
            timeline.merge(stamps)
        assert timeline.offsets()[Stage.FIRST_POSTED] == 1.0
        assert timeline.offsets()[Stage.WRITTEN] == 4.0
        assert timeline.described(Role.SENDER)["chunks"] == 4


def test_stamps_survive_the_way_between_processes() -> None:
    stamps = Stamps()
    stamps.mark(Stage.WRITTEN, 3.0)
    timeline = Timeline(1.0, 1e9)
    timeline.merge(pickle.loads(pickle.dumps(stamps)))
    assert timeline.offsets() == {Stage.QUEUED: 0.0, Stage.WRITTEN: 2.0}


@pytest.mark.parametrize("host", ["", "another boot"])
def test_a_clock_of_another_host_is_not_compared(host: str) -> None:
    stamps = Stamps(host)
    stamps.mark(Stage.WRITTEN, 3.0)
    timeline = Timeline(1.0, 1e9)
    timeline.merge(stamps)
    assert timeline.offsets() == {Stage.QUEUED: 0.0}


@given(
    role=st.sampled_from(Role),
    moments=st.dictionaries(
        st.sampled_from([stage for stage in Stage if stage is not Stage.QUEUED]),
        st.floats(-1e3, 1e3),
    ),
)
def test_phases_never_overlap_and_add_up(
    role: Role, moments: dict[Stage, float]
) -> None:
    timeline = Timeline(0.0, 1e9)
    for stage, moment in moments.items():
        timeline.mark(stage, moment)
    spans = list(timeline.spans(role))
    assert all(0.0 <= span.start <= span.end for span in spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    found = timeline.durations(role)
    assert set(found) <= set(durations(role))
    if TOTAL in found:
        parts = [found[phase.name] for phase in PHASES[role]]
        assert found[TOTAL] == pytest.approx(sum(parts))
        waits = found[COMPUTE] + found[COORDINATION] + found["transfer"]
        assert found[TOTAL] == pytest.approx(waits)
