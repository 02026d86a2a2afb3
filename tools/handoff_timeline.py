# SPDX-License-Identifier: Apache-2.0
"""Draw the trace of hand-offs that engines write (``handoff_trace_file``).

    python tools/handoff_timeline.py p.jsonl d.jsonl -o handoffs.png
    python tools/handoff_timeline.py trace.jsonl --last 5 --aligned -o last.svg
    python tools/handoff_timeline.py trace.jsonl --transfer-id 5d0c -o one.png

Each hand-off gets a bar per side, joined by its transfer_id; what both waited for is
told by colour. A table of all that was read goes to standard output. The sides are
laid side by side by the time of day, so between two hosts the picture is as exact as
their clocks agree.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLES = ("reader", "sender", "receiver")
"""From top to bottom."""

SIDES = {
    "reader": "P, earlier turn",
    "sender": "P",
    "receiver": "D",
}

COLOURS = {
    "queue": "#c6dbef",
    "prefill": "#4292c6",
    "prefill_wait": "#9ecae1",
    "claim": "#e6550d",
    "post": "#a63603",
    "release": "#fdd0a2",
    "connect": "#fdae6b",
    "answer": "#fd8d3c",
    "resume": "#d94801",
    "transfer": "#31a354",
}
"""Blue waits for compute, orange for coordination, green for bytes."""

MARKERS = {
    "registered": ("v", "registered"),
    "first_posted": ("|", "first chunk posted"),
    "last_posted": ("x", "last chunk posted"),
    "first_notification": (">", "first notification"),
    "last_notification": ("D", "last notification"),
}

CAUSES = (
    ("sender", "first_posted", "receiver", "first_notification"),
    ("sender", "last_posted", "receiver", "last_notification"),
    ("receiver", "asked", "sender", "registered"),
)
"""Roles and stages of which the second cannot come before the first."""

_BAR = 0.8
_MOST_ROWS = 400


class TraceError(ValueError):
    """There is nothing to draw; the text says why."""


@dataclass(frozen=True)
class Side:
    """One line of a trace; times are in seconds, ``queued_at`` since 1970."""

    transfer_id: str
    request_id: str
    role: str
    engine_id: str
    mode: str
    outcome: str
    queued_at: float
    stages: dict[str, float]
    phases: tuple[tuple[str, str, float, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Read a line.

        Raises:
            ValueError: it is not one of a trace.
        """
        line = json.loads(text)
        try:
            phases = tuple(
                (
                    str(phase["name"]),
                    str(phase["waits_for"]),
                    float(phase["start"]),
                    float(phase["end"]),
                )
                for phase in line["phases"]
            )
            side = cls(
                str(line["transfer_id"]),
                str(line["request_id"]),
                str(line["role"]),
                str(line["engine_id"]),
                str(line["mode"]),
                str(line["outcome"]),
                float(line["queued_at"]),
                {str(name): float(at) for name, at in line["stages"].items()},
                phases,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a line of a trace: {error!r}") from error
        if side.role not in ROLES:
            raise ValueError(f"role {side.role!r} is none of {', '.join(ROLES)}")
        return side

    def at(self, stage: str) -> float | None:
        """The time of day at which a stage was reached."""
        offset = self.stages.get(stage)
        return None if offset is None else self.queued_at + offset

    @property
    def ends_at(self) -> float:
        """The time of day of the last that is known of it."""
        return self.queued_at + max(self.stages.values(), default=0.0)


@dataclass(frozen=True)
class Handoff:
    """All sides of one hand-off, in the order of :data:`ROLES`."""

    transfer_id: str
    sides: tuple[Side, ...]

    @property
    def starts_at(self) -> float:
        """When its first side was queued."""
        return min(side.queued_at for side in self.sides)

    def of(self, role: str) -> list[Side]:
        """The sides of one role."""
        return [side for side in self.sides if side.role == role]

    @property
    def own_seconds(self) -> float | None:
        """From the end of prefill to the first step on D: what the hand-off costs."""
        senders, receivers = self.of("sender"), self.of("receiver")
        if len(senders) != 1 or not receivers:
            return None
        ended = senders[0].at("prefill_ended")
        steps = [side.at("first_step") for side in receivers]
        known = [step for step in steps if step is not None]
        return None if ended is None or not known else min(known) - ended


def read(paths: Iterable[Path]) -> tuple[list[Side], int]:
    """All sides in some files, and the number of lines that are none.

    Raises:
        OSError: a file cannot be read.
    """
    sides, strange = [], 0
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for text in lines:
                try:
                    sides.append(Side.parse(text))
                except ValueError:
                    # An engine that was killed leaves a line unfinished.
                    strange += 1
    return sides, strange


def join(sides: Iterable[Side]) -> list[Handoff]:
    """The hand-offs that the sides belong to, by time.

    A reader names the earlier turn that it reads, and belongs to the hand-off of its
    own request.
    """
    found: dict[str, list[Side]] = {}
    request: dict[tuple[str, str], str] = {}
    readers = []
    for side in sides:
        if side.role == "reader":
            readers.append(side)
            continue
        found.setdefault(side.transfer_id, []).append(side)
        request[side.engine_id, side.request_id] = side.transfer_id
    for side in readers:
        own = request.get((side.engine_id, side.request_id))
        found.setdefault(own or f"turn {side.transfer_id}", []).append(side)
    joined = [
        Handoff(
            name,
            tuple(sorted(group, key=lambda s: (ROLES.index(s.role), s.queued_at))),
        )
        for name, group in found.items()
    ]
    return sorted(joined, key=lambda handoff: handoff.starts_at)


def clock_error(handoffs: Iterable[Handoff]) -> float:
    """By how many seconds an effect comes before its cause, at the worst."""
    worst = 0.0
    for handoff in handoffs:
        for cause_role, cause, effect_role, effect in CAUSES:
            causes = [side.at(cause) for side in handoff.of(cause_role)]
            effects = [side.at(effect) for side in handoff.of(effect_role)]
            if len(causes) != 1 or len(effects) != 1:
                continue
            if causes[0] is not None and effects[0] is not None:
                worst = max(worst, causes[0] - effects[0])
    return worst


def table(handoffs: Sequence[Handoff]) -> str:
    """Median and 90th percentile of every phase, in milliseconds."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for side in (side for handoff in handoffs for side in handoff.sides):
        for name, waits_for, start, end in side.phases:
            values.setdefault((side.role, name, waits_for), []).append(end - start)
    rows = [("side", "phase", "waits for", "n", "p50 ms", "p90 ms")]
    for (role, name, waits_for), seconds in sorted(
        values.items(), key=lambda item: ROLES.index(item[0][0])
    ):
        rows.append((SIDES[role], name, waits_for, *_numbers(seconds)))
    own = [handoff.own_seconds for handoff in handoffs]
    known = [seconds for seconds in own if seconds is not None]
    if known:
        rows.append(("both", "end of prefill to first step on D", "", *_numbers(known)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def draw(handoffs: Sequence[Handoff], path: Path, aligned: bool = False) -> None:
    """Draw hand-offs, one bar a side, into ``path``, whose ending tells the format.

    ``aligned``: each begins at the left, whenever it came.

    Raises:
        TraceError: there is nothing to draw, or more than a picture can hold.
    """
    rows = [(handoff, side) for handoff in handoffs for side in handoff.sides]
    if not rows:
        raise TraceError("no hand-off to draw")
    if len(rows) > _MOST_ROWS:
        raise TraceError(
            f"{len(rows)} bars are more than a picture can hold ({_MOST_ROWS}): "
            "choose fewer hand-offs with --last"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.9 + 0.24 * len(rows) + 0.12 * len(handoffs)
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first = min(handoff.starts_at for handoff in handoffs)
    places, labels = [], []
    place = 0.0
    for handoff in handoffs:
        top = place
        origin = handoff.starts_at if aligned else first
        for number, side in enumerate(handoff.sides):
            _draw_side(axes, side, place, (side.queued_at - origin) * 1e3)
            name = f"{_short(handoff.transfer_id)}  " if number == 0 else ""
            places.append(place)
            labels.append(f"{name}{SIDES[side.role]}")
            place += 1.0
        _note_own_time(axes, handoff, top, origin)
        place += 0.6
    axes.set_yticks(places, labels, fontsize=8, family="monospace")
    axes.set_ylim(place - 0.6, -1.0)
    # Room for marks at the beginning and for what is written beside the last bar.
    width = axes.get_xlim()[1]
    axes.set_xlim(left=-0.01 * width, right=1.12 * width)
    axes.set_xlabel(
        f"milliseconds since {'its' if aligned else 'the'} first request was queued"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    _legend(axes, [side for _, side in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_side(axes: "Axes", side: Side, place: float, start: float) -> None:
    for name, _, begin, end in side.phases:
        axes.barh(
            place,
            (end - begin) * 1e3,
            left=start + begin * 1e3,
            height=_BAR,
            color=COLOURS.get(name, "0.6"),
        )
    for stage, (marker, _) in MARKERS.items():
        if stage in side.stages:
            axes.plot(
                start + side.stages[stage] * 1e3,
                place,
                marker=marker,
                markersize=5,
                color="black",
                markerfacecolor="none",
                linestyle="none",
            )
    if side.outcome not in ("served", "received", "read"):
        end = start + max(side.stages.values(), default=0.0) * 1e3
        axes.annotate(
            side.outcome,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="tab:red",
        )


def _note_own_time(axes: "Axes", handoff: Handoff, top: float, origin: float) -> None:
    own = handoff.own_seconds
    if own is None:
        return
    end = max(side.ends_at for side in handoff.sides)
    axes.annotate(
        f"{own * 1e3:,.1f} ms after prefill",
        ((end - origin) * 1e3, top + (len(handoff.sides) - 1) / 2),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def _legend(axes: "Axes", sides: Sequence[Side]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {(name, waits_for) for side in sides for name, waits_for, *_ in side.phases}
    handles: list[Any] = []
    for waits_for in ("compute", "coordination", "transfer"):
        handles += [
            Patch(
                color=colour,
                label=name if name == waits_for else f"{name} ({waits_for})",
            )
            for name, colour in COLOURS.items()
            if (name, waits_for) in drawn
        ]
    stages = {stage for side in sides for stage in side.stages}
    handles += [
        Line2D(
            [],
            [],
            marker=marker,
            color="black",
            markerfacecolor="none",
            linestyle="none",
            label=label,
        )
        for stage, (marker, label) in MARKERS.items()
        if stage in stages
    ]
    axes.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=5,
        fontsize=8,
        frameon=False,
    )


def _numbers(seconds: Sequence[float]) -> tuple[str, str, str]:
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    median = statistics.median(ordered)
    return str(len(ordered)), f"{median * 1e3:,.2f}", f"{high * 1e3:,.2f}"


def _short(transfer_id: str) -> str:
    return transfer_id if len(transfer_id) <= 12 else f"{transfer_id[:11]}…"


def _chosen(
    handoffs: Sequence[Handoff], prefix: str | None, last: int
) -> Iterator[Handoff]:
    matching = [h for h in handoffs if h.transfer_id.startswith(prefix or "")]
    yield from matching[-last:]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "-o", "--output", type=Path, help="a picture: .png, .svg or .pdf"
    )
    parser.add_argument(
        "--last",
        type=_positive,
        default=20,
        metavar="N",
        help="draw the latest N hand-offs (default 20)",
    )
    parser.add_argument(
        "--aligned", action="store_true", help="let every hand-off begin at the left"
    )
    parser.add_argument("--transfer-id", metavar="PREFIX", help="draw only these")
    options = parser.parse_args(argv)
    try:
        sides, strange = read(options.traces)
        handoffs = join(sides)
        if not handoffs:
            raise TraceError(
                f"no line of a trace in {', '.join(map(str, options.traces))}"
            )
        print(table(handoffs))
        if strange:
            print(f"{strange} lines could not be read", file=sys.stderr)
        error = clock_error(handoffs)
        if error > 0:
            print(
                f"The clocks of the engines differ by at least {error * 1e3:.1f} ms, "
                "so compare no time of one side with one of the other.",
                file=sys.stderr,
            )
        if options.output is not None:
            chosen = list(_chosen(handoffs, options.transfer_id, options.last))
            draw(chosen, options.output, options.aligned)
            print(f"{options.output}: {len(chosen)} of {len(handoffs)} hand-offs")
    except ModuleNotFoundError as missing:
        print(f"{missing}: pip install matplotlib", file=sys.stderr)
        return 2
    except (OSError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
