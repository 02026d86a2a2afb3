# SPDX-License-Identifier: Apache-2.0
"""The picture of a trace, from lines that the connector itself wrote."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import handoff_timeline
from handoff_timeline import Side, TraceError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.journal import Journal
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import (
    HandoffRecord,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import StatsCollector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import (
    PHASES,
    Role,
    Stage,
    Timeline,
    Wait,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline_trace import TraceFile

SENT = {
    Stage.PREFILL_STARTED: 0.01,
    Stage.REGISTERED: 0.02,
    Stage.FIRST_POSTED: 0.03,
    Stage.PREFILL_ENDED: 0.05,
    Stage.LAST_POSTED: 0.051,
    Stage.WRITTEN: 0.055,
    Stage.RELEASED: 0.07,
}
RECEIVED = {
    Stage.REGISTERED: 0.005,
    Stage.ASKED: 0.006,
    Stage.ANSWERED: 0.021,
    Stage.FIRST_NOTIFICATION: 0.031,
    Stage.PREFILL_ENDED: 0.05,
    Stage.LAST_NOTIFICATION: 0.056,
}


class Trace:
    """A file that an engine writes."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path = path
        self.journal = Journal(
            EngineId(engine), Mode.PUSH, StatsCollector(), TraceFile(str(path))
        )

    def add(
        self,
        transfer_id: str,
        role: Role,
        outcome: str,
        stages: dict[Stage, float],
        queued_at: float = 1e9,
        request_id: str = "r",
    ) -> None:
        timeline = Timeline(100.0, queued_at)
        for stage, seconds in stages.items():
            timeline.mark(stage, 100.0 + seconds)
        name = RequestId(request_id)
        self.journal.added(
            HandoffRecord(
                TransferId(transfer_id), name, role, outcome, timeline=timeline
            )
        )
        self.journal.scheduled({request_id}, 100.06)


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """P's and D's files, of three hand-offs, one of which has failed."""
    p, d = Trace(tmp_path / "p.jsonl", "p"), Trace(tmp_path / "d.jsonl", "d")
    for number in (1, 0):
        queued_at = 1e9 + number
        p.add(f"t{number}", Role.SENDER, "served", SENT, queued_at)
        d.add(f"t{number}", Role.RECEIVER, "received", RECEIVED, queued_at)
    d.add("t2", Role.RECEIVER, "failed", {Stage.REGISTERED: 0.005}, 1e9 + 2)
    p.journal.close()
    d.journal.close()
    return [p.path, d.path]


def test_sides_are_joined_by_transfer_id(traces: list[Path]) -> None:
    sides, strange = handoff_timeline.read(traces)
    assert strange == 0
    handoffs = handoff_timeline.join(sides)
    assert [h.transfer_id for h in handoffs] == ["t0", "t1", "t2"]
    assert [side.engine_id for side in handoffs[0].sides] == ["p", "d"]
    assert handoffs[0].own_seconds == pytest.approx(0.01, abs=1e-6)
    assert handoffs[2].own_seconds is None


def test_an_earlier_turn_belongs_to_the_request_that_reads_it(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "p.jsonl", "p")
    read = {Stage.REGISTERED: 0.001, Stage.LAST_NOTIFICATION: 0.004}
    trace.add("turn-1", Role.READER, "read", read, request_id="second")
    trace.add("turn-1", Role.SENDER, "served", SENT, 1e9 - 60, request_id="first")
    trace.add("turn-2", Role.SENDER, "served", SENT, request_id="second")
    trace.journal.close()
    first, second = handoff_timeline.join(handoff_timeline.read([trace.path])[0])
    assert [side.role for side in first.sides] == ["sender"]
    assert [side.role for side in second.sides] == ["reader", "sender"]
    assert second.transfer_id == "turn-2"


def test_a_picture_shows_every_phase(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out" / "picture.svg"
    paths = [str(path) for path in traces]
    assert handoff_timeline.main([*paths, "-o", str(picture)]) == 0
    drawn = picture.read_text()
    ET.fromstring(drawn)
    for colour in ("queue", "prefill", "post", "answer", "transfer", "resume"):
        assert handoff_timeline.COLOURS[colour] in drawn
    told = capsys.readouterr().out
    assert "3 of 3 hand-offs" in told
    rows = {tuple(line.split()[:2]): line.split()[-3:] for line in told.splitlines()}
    assert rows["P", "prefill"] == ["2", "40.00", "40.00"]
    assert rows["D", "resume"] == ["2", "4.00", "4.00"]
    assert rows["both", "end"] == ["2", "10.00", "10.00"]


def test_a_png_is_made_of_chosen_ones(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    chosen = ["--transfer-id", "t1", "--aligned"]
    arguments = [str(traces[0]), *chosen, "-o", str(picture)]
    assert handoff_timeline.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1 of 2 hand-offs" in capsys.readouterr().out


def test_an_unfinished_line_is_passed_over(
    traces: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with open(traces[0], "a", encoding="utf-8") as file:
        file.write('{"transfer_id": "t9", "ro')
    assert handoff_timeline.main([str(traces[0])]) == 0
    assert "1 lines could not be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{}", '{"transfer_id": 1, "phases": [], "stages": 3}']
)
def test_what_is_no_line_of_a_trace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Side.parse(text)


def test_clocks_that_disagree_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace(tmp_path / "trace.jsonl", "e")
    trace.add("t", Role.SENDER, "served", SENT, 1e9 + 0.5)
    trace.add("t", Role.RECEIVER, "received", RECEIVED, 1e9)
    trace.journal.close()
    assert handoff_timeline.main([str(trace.path)]) == 0
    assert "differ by at least 499.0 ms" in capsys.readouterr().err


def test_nothing_to_draw_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert handoff_timeline.main([str(empty)]) == 2
    assert "no line of a trace" in capsys.readouterr().err
    assert handoff_timeline.main([str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl" in capsys.readouterr().err
    with pytest.raises(TraceError, match="no hand-off"):
        handoff_timeline.draw([], tmp_path / "none.png")


def test_the_colours_are_those_of_the_phases() -> None:
    waits = {
        phase.name: phase.waits_for for phases in PHASES.values() for phase in phases
    }
    assert set(handoff_timeline.COLOURS) == set(waits)
    assert set(handoff_timeline.ROLES) == set(handoff_timeline.SIDES) == set(Role)
    stages = {
        stage for _, one, _, other in handoff_timeline.CAUSES for stage in (one, other)
    }
    assert stages | set(handoff_timeline.MARKERS) <= set(Stage)
    assert {str(wait) for wait in waits.values()} == set(Wait)
