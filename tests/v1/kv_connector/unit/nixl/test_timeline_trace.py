# SPDX-License-Identifier: Apache-2.0
"""The file of finished hand-offs."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline_trace import (
    QUEUED_LINES,
    TraceFile,
)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_come_in_order_after_those_that_were_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for start in (0, 3):
        trace = TraceFile(str(path))
        for number in range(start, start + 3):
            trace.put({"number": number})
        trace.close()
        assert trace.dropped == 0
    assert _lines(path) == [{"number": number} for number in range(6)]


def test_a_path_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"handoff_trace_file.*No such file"):
        TraceFile(str(tmp_path / "missing" / "trace.jsonl"))


def test_a_file_that_nobody_reads_costs_lines_and_no_time(tmp_path: Path) -> None:
    """A pipe blocks its writer as a hanging network disk would."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    trace = TraceFile(str(path))
    filler = "x" * 4096
    for _ in range(2 * QUEUED_LINES):
        trace.put({"filler": filler})
    # A pipe takes 64 KiB before it blocks.
    assert trace.dropped >= QUEUED_LINES - 17
    os.close(reader)
    trace.close()


def test_what_cannot_be_written_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = TraceFile(str(path))
    trace.put({"bad": {1, 2}})
    trace.put({"good": 1})
    trace.close()
    assert trace.dropped == 1
    assert _lines(path) == [{"good": 1}]


def test_a_full_disk_is_survived() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    trace = TraceFile("/dev/full")
    trace.put({"number": 1})
    trace.close()
    assert trace.dropped == 1


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = TraceFile(str(path), max_bytes=200)
    for number in range(100):
        trace.put({"number": number})
    trace.close()
    assert trace.dropped == 0
    assert sorted(os.listdir(tmp_path)) == ["trace.jsonl", "trace.jsonl.1"]
    assert path.stat().st_size <= 200
    older, newer = _lines(tmp_path / "trace.jsonl.1"), _lines(path)
    numbers = [line["number"] for line in older + newer]
    assert numbers == list(range(numbers[0], 100))


def test_engines_that_share_a_file_turn_it_over_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traces = [TraceFile(str(path), max_bytes=4000) for _ in range(2)]

    def write(engine: int) -> None:
        for number in range(150):
            traces[engine].put({"engine": engine, "number": number})
        traces[engine].close()

    threads = [threading.Thread(target=write, args=(engine,)) for engine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = _lines(tmp_path / "trace.jsonl.1") + _lines(path)
    # 300 lines of some 27 bytes fill two files, of which none is thrown away.
    assert len(found) >= 280
    assert {line["engine"] for line in found} == {0, 1}
