# SPDX-License-Identifier: Apache-2.0
"""The multi-turn benchmark's plot and table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multiturn_stats import Gain, Group, Spread, gains, groups, most_excess

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from multiturn_records import Run

_PARTS = (("waiting", "0.75"), ("transfer", "tab:orange"), ("compute", "tab:blue"))
_COLOURS = {False: "tab:red", True: "tab:green"}
_BAR = 0.38


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw TTFT over prompt length and the parts of prefill, a row for each mode.

    Raises:
        ValueError: there is nothing to draw.
    """
    found = [group for group in groups(runs) if group.turns()]
    modes = list(dict.fromkeys(group.mode for group in found))
    if not modes:
        raise ValueError("no turn was served, so there is nothing to plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2 * len(modes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(modes), 2, squeeze=False)
    for row, mode in zip(axes, modes, strict=True):
        of_mode = [group for group in found if group.mode == mode]
        _plot_ttft(row[0], of_mode)
        _plot_prefill(row[1], of_mode)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _plot_ttft(axes: Axes, found: Sequence[Group]) -> None:
    for group in found:
        setting = group.setting
        lengths, points = _points(group, "ttft")
        axes.errorbar(
            lengths,
            [point.median * 1000 for point in points],
            yerr=[
                [(point.median - point.low) * 1000 for point in points],
                [(point.high - point.median) * 1000 for point in points],
            ],
            marker="o",
            markersize=4,
            capsize=3,
            color=_COLOURS[setting.bidirectional],
            linestyle="--" if setting.p_prefix_caching else "-",
            label=str(setting),
        )
    axes.set_title(f"{found[0].mode}: time to first token, median, least and greatest")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _plot_prefill(axes: Axes, found: Sequence[Group]) -> None:
    caching = found[0].setting.p_prefix_caching
    shown = [group for group in found if group.setting.p_prefix_caching == caching]
    labels: dict[int, str] = {}
    for place, group in enumerate(shown):
        shift = (place - (len(shown) - 1) / 2) * (_BAR + 0.03)
        lengths, _ = _points(group, "ttft")
        places = [turn - 1 + shift for turn in group.turns()]
        labels |= {
            turn - 1: f"{length:,.0f}"
            for turn, length in zip(group.turns(), lengths, strict=True)
        }
        below = [0.0] * len(places)
        for part, colour in _PARTS:
            spreads = (group.spread(turn, part) for turn in group.turns())
            heights = [spread.median * 1000 if spread else 0.0 for spread in spreads]
            axes.bar(
                places,
                heights,
                _BAR,
                bottom=below,
                color=colour,
                edgecolor="black" if group.setting.bidirectional else "none",
                linewidth=0.8,
                label=part if place == 0 else None,
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(list(labels), list(labels.values()))
    cache = "on" if caching else "off"
    axes.set_title(
        f"{found[0].mode}: parts of prefill, P's prefix cache {cache}\n"
        "(black edge: bidirectional on; medians of each part)",
        fontsize="medium",
    )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("ms")
    axes.legend(fontsize="small")


def _points(group: Group, value: str) -> tuple[list[float], list[Spread]]:
    lengths, points = [], []
    for turn in group.turns():
        length, point = group.spread(turn, "prompt_tokens"), group.spread(turn, value)
        if length is not None and point is not None:
            lengths.append(length.median)
            points.append(point)
    return lengths, points


_Cell = Callable[[Group, int], str]


def _count(value: str) -> _Cell:
    def cell(group: Group, turn: int) -> str:
        spread = group.spread(turn, value)
        return "-" if spread is None else f"{spread.median:,.0f}"

    return cell


def _time(value: str) -> _Cell:
    def cell(group: Group, turn: int) -> str:
        spread = group.spread(turn, value)
        return "-" if spread is None else f"{spread.median * 1000:,.0f}"

    return cell


def _time_and_range(value: str) -> _Cell:
    def cell(group: Group, turn: int) -> str:
        spread = group.spread(turn, value)
        if spread is None:
            return "-"
        low, high = spread.low * 1000, spread.high * 1000
        return f"{spread.median * 1000:,.0f} ({low:,.0f}-{high:,.0f})"

    return cell


_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("mode", lambda group, _turn: group.mode),
    ("P cache", lambda group, _turn: _switch(group.setting.p_prefix_caching)),
    ("bidirectional", lambda group, _turn: _switch(group.setting.bidirectional)),
    ("prompt", _count("prompt_tokens")),
    ("computed", _count("tokens_computed")),
    ("cached", _count("tokens_cached")),
    ("read", _count("tokens_read")),
    ("TTFT ms", _time_and_range("ttft")),
    ("prefill ms", _time("prefill")),
    ("transfer", _time("transfer")),
    ("compute", _time("compute")),
    ("waiting", _time("waiting")),
)


def table(runs: Sequence[Run], allowed_excess: int | None) -> str:
    """First and last turn of each setting in Markdown, and the gains below."""
    found = [group for group in groups(runs) if group.turns()]
    names = [name for name, _ in _COLUMNS]
    lines = [_row(names), _row("---" for _ in names)]
    lines += [
        _row(cell(group, turn) for _, cell in _COLUMNS)
        for group in found
        for turn in dict.fromkeys((group.turns()[0], group.turns()[-1]))
    ]
    lines.append("")
    lines += [_gain(gain) for gain in gains(found)]
    for group in found:
        excess = most_excess(group)
        if not group.setting.bidirectional or excess is None:
            continue
        bound = "" if allowed_excess is None else f" ({allowed_excess} allowed)"
        lines.append(
            f"{group.mode}, {group.setting}: P computed at most {excess} tokens more "
            f"than the new ones{bound}"
        )
    return "\n".join(lines)


def _gain(gain: Gain) -> str:
    return (
        f"{gain.mode}, P's prefix cache {_switch(gain.p_prefix_caching)}: TTFT at "
        f"{gain.prompt_tokens:,.0f} tokens with bidirectional off is "
        f"{gain.of_medians:.2f} times that with it on (medians of {gain.paired.count} "
        f"runs each; {gain.paired.low:.2f} to {gain.paired.high:.2f} within a "
        "repetition)"
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _switch(value: bool) -> str:
    return "on" if value else "off"
