# SPDX-License-Identifier: Apache-2.0
"""The reproduction kit on this machine: a point of push and one of pull, and plots."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import late_choice
import plot_push_vs_pull
import sweep_rows
from handoff_engines import EngineRoom
from pd_launcher import Mode
from pd_processes import free_ports
from sweep_rows import Row

RUN_TIMEOUT_S = 420
PROMPTS, INPUT, OUTPUT = 6, 250, 16
BLOCK_SIZE = 32
# Keys and values of 4 layers with 4 heads of 32 numbers, as float32.
TOKEN_BYTES = 2 * 4 * 4 * 32 * 4
KIT = Path(sweep_rows.__file__).parent
PORTS = (
    "PREFILL_PORT",
    "DECODE_PORT",
    "PREFILL_SIDE_CHANNEL_PORT",
    "DECODE_SIDE_CHANNEL_PORT",
    "PROXY_PORT",
)


class Kit:
    """The kit's scripts, with folders and ports of this test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        ports = map(str, free_ports(5))
        self._environment = {
            **os.environ,
            **dict(zip(PORTS, ports, strict=True)),
            "DEVICE": "cpu",
            "PYTHON": sys.executable,
            "STATE_DIR": str(folder / "state"),
            "RESULTS_DIR": str(self.results),
            "LOG_DIR": str(folder / "logs"),
            "QPS_LIST": "4",
            "INPUT_LENS": str(INPUT),
            "OUTPUT_LENS": str(OUTPUT),
            "ITERATIONS": "1",
            "NUM_PROMPTS": str(PROMPTS),
            "START_TIMEOUT": "300",
            # The room's lock is held already.
            "NO_LOCK": "1",
        }

    def sweep(self, mode: Mode) -> str:
        """Run ``run_sweep.sh``, which must succeed; returns its output."""
        done = self._run(KIT / "run_sweep.sh", MODE=mode)
        said = done.stdout + done.stderr
        logs = "" if done.returncode == 0 else self._logs()
        assert done.returncode == 0, said + logs
        print(said)
        return said

    def cleanup(self, what: str) -> str:
        """Run ``cleanup.sh``."""
        done = self._run(KIT / "cleanup.sh", what)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def row(self, mode: Mode) -> Row:
        """The only row of a mode."""
        (path,) = self.results.glob(f"{mode}_*.json")
        return sweep_rows.load(path)

    def _run(
        self, script: Path, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(script), *arguments],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    def _logs(self) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        return "".join(f"\n--- {log}\n{log.read_text()[-3000:]}" for log in logs)


@pytest.mark.distributed
@pytest.mark.timeout(2 * RUN_TIMEOUT_S + 60, func_only=True)
def test_two_points_are_measured_proven_and_plotted(
    room: EngineRoom, tmp_path: Path
) -> None:
    room.close()
    kit = Kit(tmp_path)
    began = time.monotonic()
    try:
        said = {mode: kit.sweep(mode) for mode in ("push", "pull")}
    finally:
        # After a failure, too; on success there is nothing left to end.
        left = kit.cleanup("proxy") + kit.cleanup("server")
    print(f"two points in {time.monotonic() - began:.0f} s")

    assert "ended" not in left
    for text in said.values():
        started = re.findall(r"^(\w+): pid (\d+)", text, re.MULTILINE)
        assert sorted(name for name, _ in started) == ["decode", "prefill", "proxy"]
        for name, pid in started:
            assert not _of_session(int(pid)), f"{name} is left running"
    for mode in ("push", "pull"):
        _is_proven(kit.row(mode), mode)
        _choices_are_logged(kit.results / f"{mode}.choices.jsonl")
    _is_plotted(kit.results)
    _spoilt_rows_are_refused(kit, tmp_path / "spoilt")
    _nothing_is_measured_twice(kit)


def _is_proven(row: Row, mode: Mode) -> None:
    assert sweep_rows.problems(row) == []
    document, proof = row.document, row.document["kit"]["proof"]
    assert (document["completed"], document["failed"]) == (PROMPTS, 0)
    assert document["total_input_tokens"] == PROMPTS * INPUT
    assert document["total_output_tokens"] == PROMPTS * OUTPUT
    assert 0 < document["median_ttft_ms"] <= document["p99_e2el_ms"]
    assert document["mean_itl_ms"] > 0
    blocks = PROMPTS * -(-INPUT // BLOCK_SIZE)
    assert proof["requests_handed_over"] == PROMPTS
    assert proof["requests_handed_over_by_d"] == [PROMPTS]
    assert proof["requests_not_needed"] == proof["handoffs_failed"] == 0
    assert proof["handoff_records"] == PROMPTS
    assert proof["tokens_transferred"] == PROMPTS * INPUT
    assert proof["bytes_transferred"] == blocks * BLOCK_SIZE * TOKEN_BYTES
    assert proof["transfers"] >= PROMPTS
    assert proof["descriptors_per_request"] == proof["descriptors"] / PROMPTS
    assert proof["block_size_p"] == proof["block_size_d"] == BLOCK_SIZE
    assert (proof["prefix_caching_p"], proof["prefix_caching_d"]) == (True, False)
    assert proof["prefix_hit_rate_p"] == proof["prefix_hit_rate_d"] == 0
    # D computes nothing but what the engine counts as received anyway.
    assert proof["external_hit_rate_d"] == 1
    assert proof["achieved_rate"] == pytest.approx(PROMPTS / document["duration"])
    connectors = {"push": "NixlPushConnector", "pull": "NixlConnector"}
    assert proof["connector"] == connectors[mode]
    assert proof["backends"] == "UCX"


def _choices_are_logged(path: Path) -> None:
    choices = late_choice.load(path)
    # The warm-up's, too.
    assert len(choices) >= PROMPTS
    found = late_choice.summary(choices)
    assert (found["decode_engines"], found["differing"]) == (1, 0)


def _is_plotted(results: Path) -> None:
    for metric in ("ttft", "tpot"):
        assert _plot(results, metric) == 0
        picture = results / f"push_vs_pull_{metric}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def _spoilt_rows_are_refused(kit: Kit, folder: Path) -> None:
    for name, value in (("bytes_transferred", 0), ("external_hit_rate_d", None)):
        shutil.copytree(kit.results, folder)
        for picture in folder.glob("*.png"):
            picture.unlink()
        path = folder / kit.row("pull").path.name
        document: dict[str, Any] = json.loads(path.read_text())
        document["kit"]["proof"][name] = value
        path.write_text(json.dumps(document))

        command = [sys.executable, plot_push_vs_pull.__file__, "--metric", "ttft"]
        command += ["--results-dir", str(folder)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert done.returncode == plot_push_vs_pull.REFUSED
        assert f"{path}: kit.proof.{name} is" in done.stderr
        assert not list(folder.glob("*.png"))
        shutil.rmtree(folder)


def _nothing_is_measured_twice(kit: Kit) -> None:
    def files() -> dict[str, int]:
        found = [p for p in kit.folder.rglob("*") if p.is_file()]
        return {str(p): p.stat().st_mtime_ns for p in found}

    before = files()
    for mode in ("push", "pull"):
        assert "all points are measured and proven already" in kit.sweep(mode)
    assert files() == before


def _plot(results: Path, metric: str) -> int:
    arguments = ["--results-dir", str(results), "--metric", metric]
    return plot_push_vs_pull.main(arguments)


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found
