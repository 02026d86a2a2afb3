# SPDX-License-Identifier: Apache-2.0
"""When a finished hand-off is told, and to whom."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as names
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.journal import Journal
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import (
    HandoffRecord,
    Records,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import StatsCollector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import (
    Role,
    Stage,
    Timeline,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline_trace import TraceFile

R = RequestId("r")


class Told:
    """A journal with its surroundings."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trace.jsonl"
        self.stats = StatsCollector()
        self.journal = Journal(
            EngineId("e"), Mode.PUSH, self.stats, TraceFile(str(self.path))
        )
        self.records = Records(self.journal.added)

    def add(self, role: Role, outcome: str, stages: dict[Stage, float]) -> None:
        timeline = Timeline(100.0, 1e9)
        for stage, seconds in stages.items():
            timeline.mark(stage, 100.0 + seconds)
        record = HandoffRecord(TransferId("t"), R, role, outcome, timeline=timeline)
        self.records.add(record)

    def observed(self) -> dict[str, list[float]]:
        taken = self.stats.take()
        data = {} if taken is None else taken.data
        return {key: value for key, value in data.items() if value}

    def lines(self) -> list[dict[str, Any]]:
        self.journal.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


RECEIVED = {
    Stage.REGISTERED: 1.0,
    Stage.ASKED: 2.0,
    Stage.ANSWERED: 3.0,
    Stage.FIRST_NOTIFICATION: 4.0,
    Stage.LAST_NOTIFICATION: 5.0,
}


@pytest.mark.parametrize(
    ("role", "outcome"), [(Role.RECEIVER, "received"), (Role.READER, "read")]
)
def test_kv_that_came_is_told_when_its_request_runs(
    told: Told, role: Role, outcome: str
) -> None:
    told.add(role, outcome, RECEIVED)
    told.journal.scheduled({"other": 1}, 106.0)
    assert told.observed() == {}
    told.journal.scheduled({"other": 1, R: 1}, 107.5)
    observed = told.observed()
    assert observed[names.HANDOFF_SECONDS[role, "resume"]] == [2.5]
    assert observed[names.HANDOFF_SECONDS[role, "total"]] == [7.5]
    told.journal.scheduled({R: 1}, 108.0)
    assert told.observed() == {}
    (line,) = told.lines()
    assert line["role"] == role.value
    assert line["stages"]["first_step"] == 7.5


@pytest.mark.parametrize(
    ("role", "outcome", "count"),
    [
        (Role.SENDER, "expired", 1),
        (Role.SENDER, "served", 0),
        (Role.RECEIVER, "failed", 0),
    ],
)
def test_kv_that_expired_is_counted_by_hand_offs(
    told: Told, role: Role, outcome: str, count: int
) -> None:
    told.add(role, outcome, {})
    assert len(told.observed().get(names.EXPIRED, [])) == count


def test_a_request_that_ends_before_it_runs_is_told_without_that_step(
    told: Told,
) -> None:
    told.add(Role.RECEIVER, "received", RECEIVED)
    told.journal.finished(R)
    told.journal.finished(R)
    observed = told.observed()
    assert names.HANDOFF_SECONDS[Role.RECEIVER, "transfer"] in observed
    assert names.HANDOFF_SECONDS[Role.RECEIVER, "total"] not in observed
    assert len(told.lines()) == 1


@pytest.mark.parametrize(
    ("role", "outcome"),
    [
        (Role.SENDER, "withdrawn"),
        (Role.SENDER, "expired"),
        (Role.RECEIVER, "failed"),
        (Role.RECEIVER, "aborted"),
        (Role.RECEIVER, "not_needed"),
        (Role.READER, "missed"),
    ],
)
def test_what_was_not_handed_off_is_traced_and_not_timed(
    told: Told, role: Role, outcome: str
) -> None:
    told.add(role, outcome, {Stage.REGISTERED: 1.0, Stage.PREFILL_STARTED: 1.0})
    assert not set(told.observed()) & set(names.HANDOFF_SECONDS.values())
    (line,) = told.lines()
    assert line["outcome"] == outcome


def test_a_line_tells_all_that_is_needed_to_join_it(told: Told) -> None:
    told.add(
        Role.SENDER, "served", {Stage.PREFILL_STARTED: 1.0, Stage.PREFILL_ENDED: 3.0}
    )
    assert told.observed()[names.HANDOFF_SECONDS[Role.SENDER, "prefill"]] == [2.0]
    (line,) = told.lines()
    assert (line["transfer_id"], line["request_id"]) == ("t", "r")
    assert (line["engine_id"], line["mode"]) == ("e", "push")
    assert line["queued_at"] == 1e9
    assert line["phases"] == [
        {"name": "queue", "waits_for": "compute", "start": 0.0, "end": 1.0},
        {"name": "prefill", "waits_for": "compute", "start": 1.0, "end": 3.0},
    ]


def test_what_waits_when_the_engine_ends_is_told_then(told: Told) -> None:
    told.add(Role.RECEIVER, "received", RECEIVED)
    assert [line["outcome"] for line in told.lines()] == ["received"]


def test_a_record_is_described_in_types_that_json_has(told: Told) -> None:
    told.add(Role.RECEIVER, "received", RECEIVED)
    (described,) = json.loads(json.dumps(told.records.latest()))
    assert described["stages"]["last_notification"] == 5.0
    assert "timeline" not in described
