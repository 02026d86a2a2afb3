# SPDX-License-Identifier: Apache-2.0
"""What is measured, cell by cell. A row is a flat dict of plain values."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from microbench_engine import Engine, Setting, spin
from microbench_pair import Arrivals, Forward, Pair, Result
from microbench_play import Played
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import switch_interval

Row: TypeAlias = dict[str, float | int | str | bool]

PLAN_DESCRIPTORS = 1024
PARKED_TOKENS = 256
STEP_SECONDS = 0.01
"""Length of an engine step where the cost per step is measured."""
SLOWEST_RATE = 2e9
"""Bytes per second that every shape is expected to reach here."""

SWITCH_SECONDS = sys.getswitchinterval()
SETTLE_SECONDS = 0.1
"""In which the transfer thread puts the switch interval back."""


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of all do not exceed; not a number if none."""
    if not values:
        return float("nan")
    return float(np.quantile(np.asarray(values), share, method="inverted_cdf"))


def latency(pair: Pair, arrivals: Arrivals, forward: Forward, blocks: int) -> Row:
    """Hand-offs one at a time: how soon the first WRITE is posted."""
    assert pair.engine is not None
    tokens = blocks * pair.engine.shape.block_size
    result = pair.play(arrivals, tokens, forward)
    posted = [one.posted for one in result.timed]
    return {
        "hand_offs": len(result.timed),
        "descriptors": max(one.descriptors for one in result.timed),
        "posted_p50_ms": quantile(posted, 0.5),
        "posted_p90_ms": quantile(posted, 0.9),
        "posted_p99_ms": quantile(posted, 0.99),
        "posted_max_ms": max(posted),
        "post_call_p50_ms": quantile(
            [one.returned - one.posted for one in result.timed], 0.5
        ),
        "heard_p50_ms": quantile([one.heard for one in result.timed], 0.5),
        "heard_p99_ms": quantile([one.heard for one in result.timed], 0.99),
        "forward_rounds_per_s": result.mine.rounds / max(result.mine.spun, 1e-9),
        "outside_cores": result.outside,
    }


def rate(pair: Pair, size: int, forward: Forward, rounds: int, period: float) -> Row:
    """Long hand-offs one at a time: bytes per second, against a plain copy."""
    engine = pair.engine
    assert engine is not None
    tokens = size // engine.shape.block_bytes * engine.shape.block_size
    copied: list[float] = []
    moved: list[float] = []
    heard: list[float] = []
    outside: list[float] = []
    descriptors = 0
    for _ in range(rounds):
        copied.append(_copy_rate(engine, size))
        result = pair.play(Arrivals(1, period), tokens, forward)
        (one,) = result.timed
        moved.append(one.bytes / one.moving / 1e6)
        heard.append(one.heard)
        outside.append(result.outside)
        descriptors = one.descriptors
    ratios = [a / b for a, b in zip(moved, copied, strict=True)]
    return {
        "tokens": tokens,
        "bytes": tokens // engine.shape.block_size * engine.shape.block_bytes,
        "long_descriptors": descriptors,
        "long_heard_p50_ms": quantile(heard, 0.5),
        "moved_GB_s": quantile(moved, 0.5),
        "copy_GB_s": quantile(copied, 0.5),
        "of_copy": quantile(ratios, 0.5),
        "of_copy_least": min(ratios),
        "of_copy_most": max(ratios),
        "long_outside_cores": max(outside),
    }


def matrix(
    pair: Pair, settings: Sequence[Setting], rounds: int, size: int
) -> Iterator[Row]:
    """Every setting with both kinds of table and both kinds of forward pass."""
    for setting in settings:
        with pair.open(setting) as engine:
            shape = engine.shape
            for fragmented in (False, True):
                pair.arrange(fragmented)
                for busy in (False, True):
                    forward = Forward(busy)
                    blocks = PLAN_DESCRIPTORS // shape.regions
                    # One is over before the next one begins.
                    period = 0.04 + blocks * shape.block_bytes / SLOWEST_RATE
                    arrivals = Arrivals(rounds, period, prefill_after=0.015)
                    row: Row = {
                        "tp": shape.tp,
                        "block_size": shape.block_size,
                        "num_threads": setting.num_threads,
                        "fragmented": fragmented,
                        "busy": busy,
                    }
                    row |= latency(pair, arrivals, forward, blocks)
                    row |= rate(pair, size, forward, 3, 0.1)
                    yield row


def blocks(
    pair: Pair, settings: Sequence[Setting], tokens: int, rounds: int
) -> Iterator[Row]:
    """The same prompt with every block size, which take turns in each round."""
    moving: dict[tuple[int, bool], list[float]] = {}
    rows: dict[tuple[int, bool], Row] = {}
    for _ in range(rounds):
        for setting in settings:
            with pair.open(setting) as engine:
                for fragmented in (False, True):
                    pair.arrange(fragmented)
                    forward = Forward(busy=False)
                    result = pair.play(Arrivals(2, 0.6), tokens, forward)
                    # The first one connects the two and touches the memory.
                    one = result.timed[-1]
                    key = engine.shape.block_size, fragmented
                    times = moving.setdefault(key, [])
                    times.append(one.moving)
                    pages = engine.shape.regions * engine.shape.blocks(tokens)
                    rows[key] = {
                        "block_size": engine.shape.block_size,
                        "fragmented": fragmented,
                        "page_kib": one.bytes / pages / 1024,
                        "descriptors": one.descriptors,
                        "hand_offs": len(times),
                        "moving_p50_ms": quantile(times, 0.5),
                        "moving_least_ms": min(times),
                        "moving_most_ms": max(times),
                        "outside_cores": result.outside,
                    }
    yield from rows.values()


@contextmanager
def interval(lowered: bool) -> Iterator[None]:
    """With the transfer thread lowering the switch interval, or leaving it alone."""
    before = switch_interval.EAGER_SECONDS
    time.sleep(SETTLE_SECONDS)
    if not lowered:
        switch_interval.EAGER_SECONDS = SWITCH_SECONDS
    try:
        yield
    finally:
        time.sleep(SETTLE_SECONDS)
        switch_interval.EAGER_SECONDS = before


def hand_over(pair: Pair, setting: Setting, rounds: int, repeats: int) -> Iterator[Row]:
    """The plan of 1,024 descriptors beside a busy forward thread, in three orders.

    In turn with the switch interval lowered and left alone.
    """
    orders = {
        "KV last": Arrivals(rounds, 0.04, prefill_after=0.015),
        "registration last, 5 ms later": Arrivals(rounds, 0.04, decode_after=0.015),
        "registration last, 90 ms later": Arrivals(
            max(2, rounds // 3), 0.12, decode_after=0.1
        ),
    }
    blocks = PLAN_DESCRIPTORS // setting.shape.regions
    with pair.open(setting):
        pair.arrange(fragmented=True)
        for repeat in range(repeats):
            for order, arrivals in orders.items():
                for lowered in (True, False):
                    with interval(lowered):
                        row = latency(pair, arrivals, Forward(busy=True), blocks)
                    named: Row = {"order": order, "lowered": lowered, "repeat": repeat}
                    yield named | row


def steps(
    pair: Pair, setting: Setting, tokens: int, seconds: float, period: float
) -> Row:
    """The forward threads' CPU time per step with long hand-offs under way."""
    count = max(2, int(seconds / period))
    with pair.open(setting):
        pair.arrange(fragmented=True)
        forward = Forward(step_seconds=STEP_SECONDS, slice_seconds=STEP_SECONDS)
        result = pair.play(Arrivals(count, period), tokens, forward, STEP_SECONDS)
    return {
        "mode": setting.mode,
        "tokens": tokens,
        "hand_offs": count,
        "descriptors": max((one.descriptors for one in result.timed), default=0),
        **_step_cost("p", result.mine),
        **_step_cost("d", result.theirs),
        "in_flight_share": _share(result),
        "depth_p50": quantile(result.mine.transfers, 0.5),
        "depth_p99": quantile(result.mine.transfers, 0.99),
        "depth_max": max(result.mine.transfers),
        "outside_cores": result.outside,
    }


def chunks(
    pair: Pair,
    setting: Setting,
    tokens: int,
    counts: Sequence[int],
    rounds: int,
    compute: float,
) -> Iterator[Row]:
    """A prompt computed in so many chunks, pushed chunk by chunk and whole.

    ``compute`` is the time in seconds that its computation takes in all.
    """
    for count in counts:
        chunk = tokens // count
        variants = {
            chunked: replace(
                setting, chunk=chunk, extra={**setting.extra, "chunked_push": chunked}
            )
            for chunked in (True, False)
        }
        for chunked, variant in variants.items():
            with pair.open(variant):
                pair.arrange(fragmented=True)
                result = pair.play(
                    Arrivals(rounds, compute * 1.6 + 0.3),
                    tokens,
                    Forward(step_seconds=0.0, token_seconds=compute / tokens),
                )
            left = [one.late_bytes / one.bytes for one in result.timed]
            heard = [one.heard for one in result.timed]
            started = [one.started for one in result.timed]
            yield {
                "chunks": count,
                "chunk_wise": chunked,
                "hand_offs": len(result.timed),
                "bytes": result.timed[0].bytes,
                "left_of_bytes": quantile(left, 0.5),
                "left_times_chunks": quantile(left, 0.5) * count,
                "heard_p50_ms": quantile(heard, 0.5),
                "heard_least_ms": min(heard),
                "heard_most_ms": max(heard),
                "started_p50_ms": quantile(started, 0.5),
                "outside_cores": result.outside,
            }


def layers(
    pair: Pair,
    setting: Setting,
    tokens: int,
    counts: Sequence[int],
    rounds: int,
    computes: Sequence[float],
) -> Iterator[Row]:
    """A prompt computed in one chunk, pushed in so many groups of layers.

    ``computes`` are the times in seconds that its computation takes.
    """
    for compute in computes:
        for count in counts:
            grouped = {**setting.extra, "push_layer_groups": count}
            with pair.open(replace(setting, extra=grouped)):
                pair.arrange(fragmented=True)
                result = pair.play(
                    Arrivals(rounds, compute * 1.6 + 0.5),
                    tokens,
                    Forward(
                        step_seconds=0.0,
                        token_seconds=compute / tokens,
                        layered=True,
                    ),
                )
            heard = [one.heard for one in result.timed]
            yield {
                "compute_s": compute,
                "groups": count,
                "hand_offs": len(result.timed),
                "left_of_bytes": quantile(
                    [one.late_bytes / one.bytes for one in result.timed], 0.5
                ),
                "heard_p50_ms": quantile(heard, 0.5),
                "heard_least_ms": min(heard),
                "heard_most_ms": max(heard),
                "outside_cores": result.outside,
            }


def parked(pair: Pair, setting: Setting, seconds: float, quick: bool) -> Iterator[Row]:
    """CPU time of this process's other threads while a request waits, or none does."""
    prefill: dict[str, object] = {"transfer_id": "parked-p", "do_remote_decode": True}
    with pair.open(setting) as engine:
        yield _parked("nothing", engine, seconds)
        engine.add("parked", 1, PARKED_TOKENS, prefill)
        yield _parked("P: computed, nobody asks", engine, seconds)
    if quick:
        return
    with pair.open(setting) as engine:
        decode: dict[str, object] = {
            "transfer_id": "parked-d",
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": pair.decode_port,
        }
        engine.add("parked", 1, PARKED_TOKENS, decode)
        yield _parked("D: registered, not computed", engine, seconds)


def _parked(case: str, engine: Engine, seconds: float) -> Row:
    for _ in range(20):
        engine.step(lambda _: time.sleep(0.005))
    time.sleep(SETTLE_SECONDS)
    idle, _ = _shares(seconds, busy=False)
    busy, rounds = _shares(seconds, busy=True)
    return {
        "parked": case,
        "transfer_thread_cores": idle,
        "beside_busy_cores": busy,
        "forward_rounds_per_s": rounds,
    }


def _shares(seconds: float, busy: bool) -> tuple[float, float]:
    """Cores that the other threads use, and rounds per second of this one."""
    begun = time.perf_counter()
    total, own = time.process_time(), time.thread_time()
    rounds = 0
    if busy:
        rounds = spin(seconds)
    else:
        time.sleep(seconds)
    others = time.process_time() - total - (time.thread_time() - own)
    took = time.perf_counter() - begun
    return others / took, rounds / took


def _step_cost(side: str, played: Played) -> Row:
    cost = played.steps
    row: Row = {f"{side}_steps": len(cost)}
    for hook, spent in played.dearest.items():
        row[f"{side}_{hook}_max_ms"] = spent / 1e6
    for name, values in (
        ("scheduler", [scheduler / 1e6 for scheduler, _ in cost]),
        ("worker", [worker / 1e6 for _, worker in cost]),
        ("both", [(scheduler + worker) / 1e6 for scheduler, worker in cost]),
    ):
        row[f"{side}_{name}_p50_ms"] = quantile(values, 0.5)
        row[f"{side}_{name}_p99_ms"] = quantile(values, 0.99)
        row[f"{side}_{name}_max_ms"] = max(values)
    return row


def _share(result: Result) -> float:
    transfers = result.mine.transfers
    return sum(count > 0 for count in transfers) / len(transfers)


def _copy_rate(engine: Engine, size: int) -> float:
    """GB per second of a plain copy within the arena, which the caches lie in."""
    memory = engine.arena_bytes
    half = min(size, len(memory) // 2)
    start = time.perf_counter()
    np.copyto(memory[half : 2 * half], memory[:half])
    return half / (time.perf_counter() - start) / 1e9
