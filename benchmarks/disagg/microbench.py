# SPDX-License-Identifier: Apache-2.0
"""What a hand-off costs the host, and how soon it starts; no model, no router.

    python benchmarks/disagg/microbench.py --output results/microbench
    python benchmarks/disagg/microbench.py --quick
    python benchmarks/disagg/microbench.py --only hand-over steps

Two processes with one engine each: vLLM's scheduler, the connectors, NIXL and the side
channel are the real ones; the forward pass is a wait or a loop in pure Python. The
shapes are one rank's share of Qwen3-32B. `docs/design/host_cost.md` explains all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # Before the engine is imported, and in no process but this one and its child.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
sys.path.append(str(Path(__file__).resolve().parent))

from microbench_cells import (
    Row,
    blocks,
    chunks,
    hand_over,
    layers,
    matrix,
    parked,
    steps,
)
from microbench_engine import BenchmarkError, Setting, Shape
from microbench_pair import Pair
from microbench_table import Column, render

MIB = 1 << 20
ARENA_BYTES = 640 * MIB
"""Memory of each engine's cache; hand-offs of 16k tokens at TP 8 take 512 MiB."""

LONG_TOKENS = 16384
QUICK_TOKENS = 2048


@dataclass(frozen=True)
class Part:
    """One table: what it shows, and how its rows are made."""

    title: str
    columns: tuple[Column, ...]
    rows: Callable[[Pair, bool], Iterator[Row]]


def _matrix(pair: Pair, quick: bool) -> Iterator[Row]:
    settings = [
        Setting(pair.folder, Shape(tp, size), num_threads=number)
        for tp in (8, 4, 2)
        for size in (16, 64, 128)
        for number in (0, 2, 4)
    ]
    if quick:
        settings = [Setting(pair.folder, Shape(8, 64))]
    yield from matrix(pair, settings, 4 if quick else 12, (32 if quick else 256) * MIB)


def _hand_over(pair: Pair, quick: bool) -> Iterator[Row]:
    rounds, repeats = (3, 1) if quick else (120, 2)
    yield from hand_over(pair, Setting(pair.folder), rounds, repeats)


def _steps(pair: Pair, quick: bool) -> Iterator[Row]:
    seconds, period = (0.5, 0.25) if quick else (12.0, 0.7)
    tokens = QUICK_TOKENS if quick else LONG_TOKENS
    for mode in ("push",) if quick else ("push", "pull"):
        for chunk in (2048,) if quick else (2048, 16384):
            setting = Setting(
                pair.folder,
                Shape(split=True),
                mode,
                chunk=chunk,
                cache_bytes=ARENA_BYTES,
            )
            yield {"chunk": chunk} | steps(pair, setting, tokens, seconds, period)


def _chunks(pair: Pair, quick: bool) -> Iterator[Row]:
    setting = Setting(pair.folder)
    if quick:
        yield from chunks(pair, setting, QUICK_TOKENS, (2,), 1, 0.2)
    else:
        yield from chunks(pair, setting, LONG_TOKENS, (2, 4, 8), 5, 1.0)


def _layers(pair: Pair, quick: bool) -> Iterator[Row]:
    setting = Setting(pair.folder)
    if quick:
        yield from layers(pair, setting, QUICK_TOKENS, (2,), 1, (0.2,))
    else:
        counts, computes = (1, 2, 4, 8, 16), (0.1, 0.3, 1.0)
        yield from layers(pair, setting, LONG_TOKENS, counts, 5, computes)


def _blocks(pair: Pair, quick: bool) -> Iterator[Row]:
    sizes, rounds = ((64,), 1) if quick else ((16, 32, 64, 128), 7)
    settings = [Setting(pair.folder, Shape(8, size)) for size in sizes]
    yield from blocks(pair, settings, QUICK_TOKENS if quick else LONG_TOKENS, rounds)


def _parked(pair: Pair, quick: bool) -> Iterator[Row]:
    yield from parked(pair, Setting(pair.folder), 0.2 if quick else 3.0, quick)


PARTS = {
    "hand-over": Part(
        "From registration and KV both there to the first WRITE, forward thread busy",
        (
            Column("order", "order"),
            Column("lowered", "interval lowered"),
            Column("hand_offs", "n"),
            Column("posted_p50_ms", "p50 ms", 2),
            Column("posted_p90_ms", "p90 ms", 2),
            Column("posted_p99_ms", "p99 ms", 2),
            Column("heard_p50_ms", "last notification p50 ms", 2),
            Column("forward_rounds_per_s", "forward rounds/s", 0),
            Column("outside_cores", "outside load", 2),
        ),
        _hand_over,
    ),
    "steps": Part(
        "CPU time of the forward thread in the connector per step, ms",
        (
            Column("mode", "mode"),
            Column("chunk", "chunk"),
            Column("descriptors", "descriptors"),
            Column("p_steps", "P steps"),
            Column("p_worker_p99_ms", "P worker p99", 3),
            Column("p_scheduler_p99_ms", "P scheduler p99", 3),
            Column("p_both_p50_ms", "P both p50", 3),
            Column("p_both_p99_ms", "P both p99", 3),
            Column("p_both_max_ms", "max", 3),
            Column("d_steps", "D steps"),
            Column("d_worker_p99_ms", "D worker p99", 3),
            Column("d_scheduler_p99_ms", "D scheduler p99", 3),
            Column("d_both_p50_ms", "D both p50", 3),
            Column("d_both_p99_ms", "D both p99", 3),
            Column("d_both_max_ms", "max", 3),
            Column("in_flight_share", "in flight", 2),
            Column("depth_p50", "depth p50", 0),
            Column("depth_max", "depth max"),
        ),
        _steps,
    ),
    "chunks": Part(
        "A prompt of 16k tokens in chunks: what remains after the last one",
        (
            Column("chunks", "chunks"),
            Column("chunk_wise", "chunk-wise"),
            Column("hand_offs", "n"),
            Column("left_of_bytes", "bytes left", 3),
            Column("left_times_chunks", "times chunks", 2),
            Column("heard_p50_ms", "last notification p50 ms", 1),
            Column("heard_least_ms", "least", 1),
            Column("heard_most_ms", "most", 1),
            Column("started_p50_ms", "D's step p50 ms", 1),
            Column("outside_cores", "outside load", 2),
        ),
        _chunks,
    ),
    "layers": Part(
        "A prompt of 16k tokens in one chunk, in groups of layers",
        (
            Column("compute_s", "computed in s", 1),
            Column("groups", "groups"),
            Column("hand_offs", "n"),
            Column("left_of_bytes", "bytes left", 3),
            Column("heard_p50_ms", "last notification p50 ms", 1),
            Column("heard_least_ms", "least", 1),
            Column("heard_most_ms", "most", 1),
            Column("outside_cores", "outside load", 2),
        ),
        _layers,
    ),
    "parked": Part(
        "CPU of a worker's other threads while a request is parked",
        (
            Column("parked", "parked"),
            Column("transfer_thread_cores", "cores, forward idle", 4),
            Column("beside_busy_cores", "cores, forward busy", 4),
            Column("forward_rounds_per_s", "forward rounds/s", 0),
        ),
        _parked,
    ),
    "blocks": Part(
        "A prompt of 16k tokens at TP 8 by block size, sizes in turn",
        (
            Column("block_size", "block"),
            Column("fragmented", "fragmented"),
            Column("page_kib", "page KiB", 0),
            Column("descriptors", "descriptors"),
            Column("hand_offs", "n"),
            Column("moving_p50_ms", "moving p50 ms", 1),
            Column("moving_least_ms", "least", 1),
            Column("moving_most_ms", "most", 1),
            Column("outside_cores", "outside load", 2),
        ),
        _blocks,
    ),
    "matrix": Part(
        "All shapes: first WRITE of a plan of 1,024 pages; bytes per second of 256 MiB",
        (
            Column("tp", "TP"),
            Column("block_size", "block"),
            Column("num_threads", "threads"),
            Column("fragmented", "fragmented"),
            Column("busy", "busy"),
            Column("posted_p50_ms", "posted p50 ms", 2),
            Column("posted_max_ms", "max", 2),
            Column("heard_p50_ms", "last notification p50 ms", 2),
            Column("long_descriptors", "descriptors"),
            Column("moved_GB_s", "GB/s", 2),
            Column("copy_GB_s", "plain copy", 2),
            Column("of_copy", "of copy", 2),
            Column("of_copy_least", "least", 2),
            Column("of_copy_most", "most", 2),
            Column("outside_cores", "outside load", 2),
        ),
        _matrix,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of each")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--output", type=Path, help="folder for microbench.json and .md"
    )
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    found: dict[str, list[Row]] = {}
    texts: list[str] = []
    pair = Pair(ARENA_BYTES // (4 if options.quick else 1))
    try:
        for name in options.only:
            part = PARTS[name]
            rows = found[name] = []
            for row in part.rows(pair, options.quick):
                rows.append(row)
                print(
                    f"{name}: {len(rows)} rows, {time.monotonic() - begun:.0f} s",
                    file=sys.stderr,
                )
            texts.append(render(part.title, part.columns, rows))
            print(texts[-1], flush=True)
            if options.output is not None:
                _save(options.output, found, texts)
    except BenchmarkError as error:
        print(f"The benchmark has failed: {error}", file=sys.stderr)
        return 1
    finally:
        pair.close()
    return 0


def _save(folder: Path, found: dict[str, list[Row]], texts: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": found,
    }
    (folder / "microbench.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "microbench.md").write_text("\n".join(texts))


if __name__ == "__main__":
    sys.exit(main())
