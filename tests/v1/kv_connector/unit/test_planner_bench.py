# SPDX-License-Identifier: Apache-2.0
"""The planner's benchmark, with so little work that it says nothing about speed."""

import json
from pathlib import Path

import pytest

import planner_bench
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import load


def test_every_case_is_measured_for_every_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if load({}) is None:
        pytest.skip("the native planner is not built here")
    rounds, repeats = 2, 3
    output = tmp_path / "deeper" / "rounds.json"
    planner_bench.main(
        [
            "--blocks=4,300",
            "--tokens=40",
            "--layers=2",
            "--max-transfer-bytes=100000",
            f"--rounds={rounds}",
            f"--repeats={repeats}",
            # The count of repetitions is what ends a round.
            "--seconds=30",
            f"--json={output}",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    records = json.loads(output.read_text())
    assert len(lines) - 2 == len(records) == 2 * (2 * 2 + 2)
    assert {line.count("|") for line in lines} == {len(planner_bench.HEADINGS) + 1}
    for record in records:
        assert set(record["microseconds"]) == {"numpy", "native", "released", "held"}
        for runs in record["microseconds"].values():
            assert [len(run["whole"]) for run in runs] == [repeats] * rounds
            for run in runs:
                for first, whole in zip(run["first"], run["whole"], strict=True):
                    assert 0 < first <= whole


def test_without_the_compiled_planner_there_is_nothing_to_compare() -> None:
    with pytest.raises(SystemExit, match="not built"):
        planner_bench.variants(None)
