# SPDX-License-Identifier: Apache-2.0
"""Rows of the reproduction kit: points, proofs, what is refused, plots, resuming."""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

import plot_push_vs_pull
import sweep
import sweep_rows
from sweep_points import (
    Forecast,
    Length,
    Point,
    PointError,
    duration,
    points,
)
from sweep_proof import movement, parse_metrics, prove
from sweep_rows import PROOF_FIELDS, RowError
from v1.kv_connector.unit.sweep_samples import (
    POINT,
    SETTINGS,
    client,
    options,
    states,
    write,
)

PNG = b"\x89PNG\r\n\x1a\n"
# ---- points


def test_every_iteration_goes_through_the_whole_grid() -> None:
    made = points("1 0.5", "1024 2048-4096", "128", 2)

    assert len(made) == len(set(made)) == 8
    assert [point.iteration for point in made] == [1] * 4 + [2] * 4
    assert made[0].name("push") == "push_qps1_in1024_out128_iter1"
    assert made[3].name("pull-early") == "pull-early_qps0.5_in2048-4096_out128_iter1"
    assert len({point.seed for point in made}) == 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("", "1", "1", 1), "QPS_LIST is empty"),
        (("1 x", "1", "1", 1), "QPS_LIST holds 'x'"),
        (("inf", "1", "1", 1), "QPS_LIST holds 'inf'"),
        (("1", "0", "1", 1), "INPUT_LENS holds '0'"),
        (("1", "9-8", "1", 1), "INPUT_LENS holds '9-8'"),
        (("1", "1", "2 2", 1), "OUTPUT_LENS names a value twice"),
        (("1", "1", "1", 0), "ITERATIONS is 0"),
    ],
)
def test_lists_that_cannot_be_run_are_refused(
    arguments: tuple[str, str, str, int], named: str
) -> None:
    with pytest.raises(PointError, match=named):
        points(*arguments)


def test_mixed_lengths_stay_within_their_limits() -> None:
    for low, high in ((1024, 16384), (16, 512), (1, 2), (7, 12), (5, 5)):
        length = Length(low, high)
        # As the load generator makes whole numbers of them.
        assert math.floor(length.middle * (1 - length.ratio)) == low
        assert math.ceil(length.middle * (1 + length.ratio)) in (high - 1, high)
    assert Length(100, 100).ratio == 0


def test_time_left_follows_what_was_measured() -> None:
    one, other = points("1 4", "8", "8", 1)
    forecast = Forecast(requests=20)
    assert forecast.left([one]) is None

    for seconds in (25.0, 27.0, 90.0):
        forecast.note(one, seconds)

    # Twenty and five seconds of arrivals, and seven more for each.
    assert forecast.left([one, other]) == pytest.approx(39.0)
    assert [duration(s) for s in (45, 600, 11100)] == ["45 s", "10 min", "3 h 05 min"]


# ---- proofs


def test_metrics_are_read_and_summed() -> None:
    text = "\n".join(
        (
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0',
            'vllm:nixl_info{connector="NixlPullConnector",backends="LIBFABRIC"} 1.0',
            'vllm:prefix_cache_hits_total{engine="0"} 3.0',
            'vllm:prefix_cache_hits_total{engine="1"} 4.0',
            "",
        )
    )

    state = parse_metrics(text)

    assert (state.block_size, state.prefix_caching) == (16, False)
    assert (state.connector, state.backends) == ("NixlConnector", "LIBFABRIC")
    assert state.sample("vllm:prefix_cache_hits_total") == 7
    assert state.sample("vllm:never_counted") == 0


def test_a_proof_is_what_was_moved_between_two_snapshots() -> None:
    before, after = states()

    proof = prove("push", before, after, client())

    assert proof["achieved_rate"] == pytest.approx(1.6)
    assert (proof["bytes_transferred"], proof["bytes_recorded"]) == (4096, 4096)
    assert (proof["transfers"], proof["descriptors_per_request"]) == (8, 16)
    assert (proof["tokens_transferred"], proof["requests_handed_over"]) == (1024, 4)
    assert (proof["external_hit_rate_d"], proof["prefix_hit_rate_p"]) == (1, 0.25)
    assert (proof["prefix_hit_rate_d"], proof["prefix_caching_d"]) == (0, False)
    assert proof["handoff_records"] == 4
    assert proof["handoff_seconds_median"] == pytest.approx(0.2)
    # The records of before are known, and pull's mover is D, which counted nothing.
    assert movement("push", after, after)["handoff_records"] == 0
    assert movement("pull", before, after)["bytes_transferred"] == 0


def test_two_decode_engines_are_summed() -> None:
    before, after = states()

    moved = movement("push", [*before, before[1]], [*after, after[1]])

    assert moved["requests_handed_over"] == 8
    assert moved["requests_handed_over_by_d"] == [4, 4]
    assert moved["bytes_transferred"] == 4096


# ---- what is refused


def test_a_whole_row_is_believed(tmp_path: Path) -> None:
    for label in ("push", "pull", "pull-early", "single"):
        row = sweep_rows.load(write(tmp_path, label))
        assert sweep_rows.problems(row) == []
        assert (row.label, row.point) == (label, POINT)
    assert row.value("ttft") == 100


@pytest.mark.parametrize("name", PROOF_FIELDS)
def test_a_row_without_one_part_of_its_proof_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path)
    document = json.loads(path.read_text())
    for spoil in ("absent", "null", "text"):
        spoilt = copy.deepcopy(document)
        proof = spoilt["kit"]["proof"]
        if spoil == "absent":
            del proof[name]
        else:
            proof[name] = None if spoil == "null" else ""
        path.write_text(json.dumps(spoilt))

        (reason, *others) = sweep_rows.refusals([sweep_rows.load(path)])

        # Without a count that others are compared with, these are named, too.
        named = [reason, *others]
        assert any(one.startswith(f"{path}: kit.proof.{name} ") for one in named)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes_transferred", 0),
        ("bytes_recorded", 4095),
        ("requests_handed_over", 0),
        ("requests_handed_over", 3),
        ("handoffs_failed", 1),
        ("external_hit_rate_d", 0.0),
        ("external_hit_rate_d", 1.5),
        ("prefix_hit_rate_p", -0.1),
        ("achieved_rate", float("inf")),
        ("connector", "NixlConnector"),
        ("descriptors_per_request", 0),
    ],
)
def test_a_row_whose_proof_does_not_fit_is_refused(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = write(tmp_path)
    document = json.loads(path.read_text())
    document["kit"]["proof"][name] = value
    path.write_text(json.dumps(document))

    named = [problem.field for problem in sweep_rows.problems(sweep_rows.load(path))]

    if name == "requests_handed_over":
        name = "requests_ended"
    assert f"kit.proof.{name}" in named


@pytest.mark.parametrize(
    ("name", "value"),
    [("completed", 3), ("failed", 1), ("median_ttft_ms", None), ("median_tpot_ms", 0)],
)
def test_a_row_with_failed_requests_or_no_times_is_refused(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = write(tmp_path)
    document = json.loads(path.read_text())
    document[name] = value
    path.write_text(json.dumps(document))

    named = [problem.field for problem in sweep_rows.problems(sweep_rows.load(path))]

    assert name in named


def test_a_row_without_any_proof_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    document = json.loads(path.read_text())
    del document["kit"]["proof"]
    path.write_text(json.dumps(document))
    (reason,) = sweep_rows.refusals([sweep_rows.load(path)])
    assert reason == f"{path}: kit.proof is missing"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "kit is missing or broken"),
        ("{", "kit is missing or broken"),
        ('{"kit": {"format": 0}}', "format is 0, expected 1"),
        ('{"kit": {"format": 1, "qps": 1}}', "kit is missing or broken"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "push_qps1_in1_out1_iter1.json"
    path.write_text(text)
    with pytest.raises(RowError, match=f"{path}: {named}"):
        sweep_rows.load_all(tmp_path)


# ---- plots


def rows_of(folder: Path, labels: tuple[str, ...] = ("push", "pull", "single")) -> None:
    for label in labels:
        for point in points("1 2 4 8", "256 512-1024", "16", 2):
            factor = {"push": 1, "pull": 3}.get(label, 2)
            write(folder, label, point, factor * (100 + point.iteration))


def plot(folder: Path, *arguments: str) -> int:
    return plot_push_vs_pull.main(["--results-dir", str(folder), *arguments])


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_four_rates_make_four_panels(
    tmp_path: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(tmp_path)

    assert plot(tmp_path, "--metric", metric) == 0

    picture = tmp_path / f"push_vs_pull_{metric}.png"
    assert picture.read_bytes().startswith(PNG)
    said = capsys.readouterr().out
    assert (
        "4 requests/s, 512-1024 in, 16 out: pull is 3.00 times push in "
        f"{metric.upper()} (3.00 to 3.00 in 2 runs)" in said
    )
    assert "48 rows, all proven" in said


def test_iterations_of_a_point_are_drawn_together(tmp_path: Path) -> None:
    rows_of(tmp_path, ("push",))
    values = plot_push_vs_pull.grouped(sweep_rows.load_all(tmp_path), "ttft")
    assert len(values) == 8
    assert all(sorted(runs) == [101, 102] for runs in values.values())


def test_a_spoilt_row_is_not_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(tmp_path)
    path = tmp_path / "pull_qps4_in256_out16_iter2.json"
    document = json.loads(path.read_text())
    del document["kit"]["proof"]["bytes_transferred"]
    path.write_text(json.dumps(document))

    status = plot(tmp_path, "--metric", "ttft")

    assert status == plot_push_vs_pull.REFUSED != 0
    said = capsys.readouterr().err
    assert (
        f"{path}: kit.proof.bytes_transferred is missing, expected more than 0" in said
    )
    assert not list(tmp_path.glob("*.png"))
    # The others can be drawn without it.
    assert plot(tmp_path, "--metric", "ttft", "--labels", "push", "single") == 0


def test_a_gap_in_one_mode_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(tmp_path)
    path = tmp_path / "pull_qps8_in256_out16_iter1.json"
    path.unlink()
    assert plot(tmp_path, "--metric", "ttft") == plot_push_vs_pull.REFUSED
    assert f"{path}: the row is missing" in capsys.readouterr().err


def test_rows_of_unequal_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "push")
    path = write(tmp_path, "single", settings={**SETTINGS, "caches": "on"})
    assert plot(tmp_path, "--metric", "ttft") == plot_push_vs_pull.REFUSED
    said = capsys.readouterr().err
    assert f"{path}: kit.settings.caches is 'on', not 'off'" in said


def test_an_empty_folder_is_no_plot(tmp_path: Path) -> None:
    assert plot(tmp_path, "--metric", "ttft") == 2


# ---- resuming


def remaining(folder: Path, **changed: str) -> list[Point]:
    parsed: argparse.Namespace = sweep._parser().parse_args(options(folder, **changed))
    return sweep.Sweep(parsed).remaining


def test_only_what_is_measured_and_proven_is_left_out(tmp_path: Path) -> None:
    first, second = points("2", "256", "16", 2)
    assert remaining(tmp_path) == [first, second]

    path = write(tmp_path, "push", first)
    assert remaining(tmp_path) == [second]
    # Of another mode, or what an interrupted run left: neither counts.
    write(tmp_path, "pull", second)
    (tmp_path / f"{second.name('push')}.partial").write_text("{")
    assert remaining(tmp_path) == [second]

    document = json.loads(path.read_text())
    document["kit"]["proof"]["transfers"] = 0
    path.write_text(json.dumps(document))
    assert remaining(tmp_path) == [first, second]


def test_rows_of_other_settings_are_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "push", POINT)

    status = sweep.main(options(tmp_path, caches="on"))

    assert status == 2
    said = capsys.readouterr().err
    assert "kit.settings.caches is 'off', not 'on'" in said
    assert "Choose another RESULTS_DIR" in said


def test_nothing_is_done_where_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for point in points("2", "256", "16", 2):
        write(tmp_path, "push", point)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir())

    # Nobody listens at the addresses of these engines.
    assert sweep.main(options(tmp_path, "run")) == 0

    assert "2 points, 2 of them measured already" in capsys.readouterr().out
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir()) == before


def test_engines_that_are_not_there_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(options(tmp_path, "check")) == 2
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9/health did not answer" in said
