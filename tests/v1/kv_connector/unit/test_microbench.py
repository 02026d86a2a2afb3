# SPDX-License-Identifier: Apache-2.0
"""The microbenchmark runs to its end and counts what really happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import microbench
from microbench_cells import PLAN_DESCRIPTORS, quantile
from microbench_engine import Shape
from microbench_table import Column, render

pytestmark = pytest.mark.timeout(240)

SECONDS = 200.0


def test_a_quick_run_measures_every_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, microbench.__file__, "--quick", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "microbench.json").read_text())["rows"]
    assert list(rows) == list(microbench.PARTS)
    assert all(rows.values())

    for row in rows["hand-over"]:
        assert row["hand_offs"] > 1
        assert row["descriptors"] == PLAN_DESCRIPTORS
        assert row["posted_p50_ms"] <= row["heard_p99_ms"]

    (steps,) = rows["steps"]
    tokens = microbench.QUICK_TOKENS
    assert steps["descriptors"] > 0.9 * tokens / 16 * 128
    assert 0 < steps["p_both_p50_ms"] <= steps["p_both_p99_ms"]

    chunk_wise, whole = rows["chunks"]
    assert (chunk_wise["chunk_wise"], whole["chunk_wise"]) == (True, False)
    assert chunk_wise["bytes"] == whole["bytes"] == tokens * 32768
    assert chunk_wise["left_of_bytes"] == pytest.approx(0.5, abs=0.01)
    assert whole["left_of_bytes"] == 1

    (grouped,) = rows["layers"]
    assert grouped["groups"] == 2
    # The last group cannot be written before it is computed.
    assert 0.49 < grouped["left_of_bytes"] <= 1

    assert [row["parked"][:1] for row in rows["parked"]] == ["n", "P"]

    by_table = {(row["fragmented"], row["busy"]): row for row in rows["matrix"]}
    assert len(by_table) == 4
    for row in by_table.values():
        assert row["bytes"] == 32 << 20
        assert row["moved_GB_s"] > 0
    assert by_table[False, False]["long_descriptors"] == 64
    assert by_table[True, False]["long_descriptors"] > 900

    for part in microbench.PARTS.values():
        assert part.title in done.stdout


def test_shapes_are_one_ranks_share() -> None:
    # 64 layers, K and V, 8 heads of 128 elements of two bytes: 256 KiB per token.
    for tp in (8, 4, 2):
        for block_size in (16, 64, 128):
            shape = Shape(tp, block_size)
            assert shape.block_bytes * tp == block_size << 18
            split = Shape(tp, block_size, split=True)
            assert split.block_bytes == shape.block_bytes
            assert split.regions == 128
    assert Shape(block_size=16).blocks(17) == 2


def test_quantiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, share) for share in (0.5, 0.99, 0.2)] == [3.0, 5.0, 1.0]
    assert quantile([], 0.5) != quantile([], 0.5)


def test_a_table_says_what_is_missing() -> None:
    columns = (Column("a", "A"), Column("b", "B", 2), Column("c", "C"))
    text = render("Title", columns, [{"a": 1234, "b": 0.5}, {"a": True, "c": "x"}])
    assert text.splitlines() == [
        "### Title",
        "",
        "|     A |    B | C |",
        "|------:|-----:|--:|",
        "| 1,234 | 0.50 | - |",
        "|   yes |    - | x |",
    ]
