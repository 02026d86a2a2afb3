# SPDX-License-Identifier: Apache-2.0
"""What carries the bytes: what engines tell of it, and what their logs do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep_proof import State
from verify_engines import Engine
from verify_result import Report

_RAILS = re.compile(r"Rail Manager created with (\d+)")
_MAPPED = re.compile(r"mapped to rail|Registered memory on rail")
# With UCX_LOG_LEVEL=info; what follows are the lanes by purpose.
_UCX = re.compile(r"\b((?:intra|inter)-node) cfg#\d+ (.*)$")

BACKEND = "NIXL backend"
_LOGS = "rails and lanes in the logs"


class NoLog(ValueError):
    """A log cannot be read."""


def check_backends(
    report: Report, states: Mapping[Engine, State], expected: str | None
) -> None:
    """All engines run the same connector over the same backends."""
    untold = [str(engine) for engine, state in states.items() if not state.connector]
    if untold:
        report.unknown(
            BACKEND,
            f"{untold[0]} tells no vllm:nixl_info: not this project's connector, or "
            "one inside a MultiConnector",
        )
        return
    found = sorted({(s.connector, s.backends) for s in states.values()}, key=str)
    problems = []
    if len(found) > 1:
        problems.append(
            f"engines differ: {'; '.join(f'{c} over {b}' for c, b in found)}"
        )
    connector, backends = found[0]
    if expected and expected not in str(backends).split(","):
        problems.append(f"{connector} runs over {backends}, expected {expected}")
    report.add(
        BACKEND,
        problems,
        f"{connector} over {backends}, on all engines",
        "Give all engines the same `kv_connector`, set `backends` in "
        "`kv_connector_extra_config` alike and "
        "restart them. `NIXL_LOG_LEVEL=INFO` in an engine's environment shows why a "
        "plugin does not load.",
    )


def rank_facts(engine: Engine, document: Mapping[str, Any]) -> tuple[str, str]:
    """A line on the ranks of an engine, from its answer about integrity."""
    ranks = document.get("ranks") or []
    if not ranks:
        return str(engine), "tells nothing of its ranks"
    first = ranks[0]
    transport = Counter(_shown(rank["transport"]) for rank in ranks)
    tokens, size = first["block_size"], first["block_bytes"]
    told = (
        f"{document['mode']}, {len(ranks)} rank(s), {first['dtype']}, "
        f"{first['memory']}, blocks of {tokens} tokens with {size:,} bytes in "
        f"{first['regions']} regions; "
    )
    return str(engine), told + "; ".join(f"{n} x {t}" for t, n in transport.items())


def check_log(path: Path) -> None:
    """Find out before anything is asked.

    Raises:
        NoLog: a log cannot be read.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise NoLog(f"--log {path} cannot be read: {error.strerror}") from error


def check_logs(
    report: Report, logs: Sequence[Path], expected_rails: int | None
) -> None:
    """Rails of LIBFABRIC and lanes of UCX, which only logs tell.

    Raises:
        NoLog: a log cannot be read.
    """
    if not logs and expected_rails is None:
        return
    rails: Counter[int] = Counter()
    lanes: dict[str, None] = {}
    mapped = 0
    for path in logs:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if found := _RAILS.search(line):
                        rails[int(found[1])] += 1
                    elif _MAPPED.search(line):
                        mapped += 1
                    elif found := _UCX.search(line):
                        lanes.setdefault(f"{found[1]}: {' '.join(found[2].split())}")
        except OSError as error:
            raise NoLog(f"--log {path} cannot be read: {error.strerror}") from error
    said = [f"{n} rank(s) with {count} rails" for count, n in sorted(rails.items())]
    if rails:
        said.append(f"{mapped} lines on memory registered on rails")
    if lanes:
        said.append("lanes of UCX (in the notes)")
    if not said:
        report.unknown(
            _LOGS,
            "the logs given say nothing of rails or lanes"
            if logs
            else "no log is given",
            "Start the engines with `NIXL_LOG_LEVEL=DEBUG` (LIBFABRIC) or "
            "`UCX_LOG_LEVEL=info` (UCX), for this run only: it costs time. Give the "
            "log of each engine as `--log`.",
        )
        return
    problems = []
    if expected_rails is not None:
        few = {count: n for count, n in rails.items() if count < expected_rails}
        if few or not rails:
            told = ", ".join(said[: len(rails)]) or "none"
            problems.append(
                f"expected {expected_rails} rails for each rank, got {told}"
            )
    report.add(
        _LOGS,
        problems,
        ", ".join(said),
        "`fi_info -p efa | grep -c 'domain:.*-rdm'` counts the devices of the host. "
        "Fewer than expected: the instance lacks EFA interfaces, the container does "
        "not get `/dev/infiniband`, or the libfabric found first is not that of the "
        "EFA installer.",
        list(lanes),
    )


def _shown(transport: Mapping[str, str]) -> str:
    if not transport:
        return "transport not told"
    told = dict(transport)
    text = str(told.pop("backends", "?"))
    efa = told.pop("efa_devices", "0")
    if efa != "0":
        text += f", {efa} EFA devices"
    return text + "".join(f", {name}={value}" for name, value in sorted(told.items()))
