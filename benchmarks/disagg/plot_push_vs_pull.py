# SPDX-License-Identifier: Apache-2.0
"""Draws what ``run_sweep.sh`` has measured: a panel for each rate, over prompt length.

    python plot_push_vs_pull.py --results-dir results --metric ttft
    python plot_push_vs_pull.py --results-dir results --metric tpot

Rows without the proof that KV was really handed over are not drawn: the exit status
is then 3, and each file is named with its fields at fault.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweep_points import LABELS, Length
from sweep_rows import METRICS, Row, RowError, load_all, refusals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFUSED = 3
_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}
_COLOURS = {
    "push": "tab:green",
    "pull": "tab:red",
    "pull-early": "tab:orange",
    "pull-inline": "tab:purple",
    "single": "tab:gray",
}
_SHOWN_REASONS = 20

Key = tuple[float, str, Length, Length]
"""Rate, label, lengths of prompts and of answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_args(argv)
    folder: Path = options.results_dir
    try:
        rows = [
            row
            for row in load_all(folder)
            if options.labels is None or row.label in options.labels
        ]
    except RowError as error:
        return _refuse([str(error)])
    if not rows:
        print(f"{folder} holds no rows; run run_sweep.sh first", file=sys.stderr)
        return 2
    reasons = refusals(rows)
    if reasons:
        return _refuse(reasons)
    output: Path = options.output or folder / f"push_vs_pull_{options.metric}.png"
    plot(rows, options.metric, output)
    for line in ratios(rows, options.metric):
        print(line)
    print(f"{len(rows)} rows, all proven; the plot is {output}")
    return 0


def grouped(rows: Sequence[Row], metric: str) -> dict[Key, list[float]]:
    """The values of all iterations of a point, in milliseconds."""
    found: dict[Key, list[float]] = defaultdict(list)
    for row in rows:
        point = row.point
        key = (point.qps, row.label, point.input_len, point.output_len)
        found[key].append(row.value(metric))
    return dict(found)


def plot(rows: Sequence[Row], metric: str, path: Path) -> None:
    """Draw the medians over the iterations, with the least and the greatest value."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = grouped(rows, metric)
    rates = sorted({key[0] for key in values})
    columns = min(2, len(rates))
    lines = -(-len(rates) // columns)
    figure = Figure(figsize=(6 * columns, 4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for panel, rate in zip(axes, rates, strict=False):
        _panel(panel, rate, values, metric)
    for panel in list(axes)[len(rates) :]:
        panel.set_axis_off()
    settings = rows[0].settings
    figure.suptitle(
        f"{_NAMES[metric]}, median of each run; bars: least and greatest run\n"
        f"{settings.get('device')}, TP {settings.get('tp_size')}, "
        f"{settings.get('num_prompts')} requests a point, caches "
        f"{settings.get('caches')}",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(
    panel: Axes, rate: float, values: dict[Key, list[float]], metric: str
) -> None:
    # Mixed lengths have no place on an axis of numbers, so each length is a category.
    lengths = sorted({key[2] for key in values})
    outputs = sorted({key[3] for key in values})
    for label in LABELS:
        for number, output in enumerate(outputs):
            found = [
                (place, values[rate, label, length, output])
                for place, length in enumerate(lengths)
                if (rate, label, length, output) in values
            ]
            if not found:
                continue
            medians = [statistics.median(runs) for _, runs in found]
            panel.errorbar(
                [place for place, _ in found],
                medians,
                yerr=[
                    [m - min(r) for m, (_, r) in zip(medians, found, strict=True)],
                    [max(r) - m for m, (_, r) in zip(medians, found, strict=True)],
                ],
                marker="o",
                markersize=4,
                capsize=3,
                color=_COLOURS[label],
                linestyle=("-", "--", ":", "-.")[number % 4],
                label=label if len(outputs) == 1 else f"{label}, {output} out",
            )
    panel.set_title(f"{rate:g} requests/s")
    panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    panel.set_xlabel("prompt tokens")
    panel.set_ylabel(f"{metric.upper()} in ms")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def ratios(rows: Sequence[Row], metric: str) -> list[str]:
    """Other labels over push, run by run, for each point."""
    by_run: dict[tuple[Key, int], float] = {}
    for row in rows:
        point = row.point
        key = (point.qps, row.label, point.input_len, point.output_len)
        by_run[key, point.iteration] = row.value(metric)
    found: dict[Key, list[float]] = defaultdict(list)
    for (key, iteration), value in by_run.items():
        push = by_run.get(((key[0], "push", *key[2:]), iteration))
        if push and key[1] != "push":
            found[key].append(value / push)
    return [
        f"{qps:g} requests/s, {input_len} in, {output_len} out: {label} is "
        f"{statistics.median(runs):.2f} times push in {metric.upper()} "
        f"({min(runs):.2f} to {max(runs):.2f} in {len(runs)} runs)"
        for (qps, label, input_len, output_len), runs in sorted(found.items())
    ]


def _refuse(reasons: Sequence[str]) -> int:
    print("not plotted, because these rows prove nothing:", file=sys.stderr)
    for reason in reasons[:_SHOWN_REASONS]:
        print(f"  {reason}", file=sys.stderr)
    more = len(reasons) - _SHOWN_REASONS
    if more > 0:
        print(f"  and {more} more", file=sys.stderr)
    print(
        "Run run_sweep.sh again with the same settings: it measures such points anew. "
        "docs/features/reproduce.md says what each field means.",
        file=sys.stderr,
    )
    return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results-dir", type=Path, required=True, metavar="FOLDER")
    add("--metric", choices=METRICS, required=True)
    add("--labels", nargs="+", choices=LABELS, help="only these; default: all rows")
    add("--output", type=Path, help="default: in the folder of the rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
