# SPDX-License-Identifier: Apache-2.0
"""Rows, snapshots and command lines for the tests of the reproduction kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sweep_rows
from sweep_points import Length, Point, mode_of
from sweep_proof import State, prove

SETTINGS = {
    "device": "cpu",
    "model": "m",
    "tp_size": 1,
    "num_prompts": 4,
    "prefix_len": 0,
    "caches": "off",
    "decode_engines": 1,
    "engine_options": "",
}
POINT = Point(2.0, Length(256, 256), Length(16, 16), 1)


def client(ttft: float = 100.0) -> dict[str, Any]:
    return {
        "num_prompts": 4,
        "completed": 4,
        "failed": 0,
        "duration": 2.5,
        "total_input_tokens": 1024,
        "median_ttft_ms": ttft,
        "median_tpot_ms": ttft / 10,
    }


def states() -> tuple[list[State], list[State]]:
    """Snapshots of P and D around four requests of push."""
    before = [
        State(
            {"vllm:nixl_bytes_transferred_sum": 100.0}, 32, True, "NixlPushConnector"
        ),
        State({}, 32, False, "NixlPushConnector", "UCX", {"receiver_tokens": 7}, ()),
    ]
    p_samples = {
        "vllm:nixl_bytes_transferred_sum": 4196.0,
        "vllm:nixl_bytes_transferred_count": 8.0,
        "vllm:nixl_num_descriptors_sum": 64.0,
        "vllm:prefix_cache_hits_total": 256.0,
    }
    counters = {
        "receiver_received": 4,
        "receiver_tokens": 1031,
        "receiver_bytes": 4096,
    }
    records = [
        {"role": "receiver", "outcome": outcome, "request_id": name, "seconds": seconds}
        for name, outcome, seconds in (
            ("a", "received", 0.1),
            ("b", "received", 0.3),
            ("c", "received", 0.2),
            ("d", "received", 0.2),
            ("e", "failed", 9.0),
        )
    ]
    after = [
        State(p_samples, 32, True, "NixlPushConnector", "UCX"),
        State(
            {"vllm:external_prefix_cache_hits_total": 1024.0},
            32,
            False,
            "NixlPushConnector",
            "UCX",
            counters,
            records,
        ),
    ]
    return before, after


def write(
    folder: Path,
    label: str = "push",
    point: Point = POINT,
    ttft: float = 100.0,
    settings: dict[str, Any] | None = None,
) -> Path:
    before, after = states()
    proof = prove("push", before, after, client(ttft))
    if mode_of(label) == "pull":
        proof["connector"] = "NixlConnector"
    if label == "single":
        proof = prove("single", [State()], [State({}, 32, False)], client(ttft))
    return sweep_rows.write(
        folder, label, point, client(ttft), settings or SETTINGS, proof
    )


def options(folder: Path, what: str = "plan", **changed: str) -> list[str]:
    values = {
        "label": "push",
        "results": str(folder),
        "qps": "2",
        "input-lens": "256",
        "output-lens": "16",
        "iterations": "2",
        "num-prompts": "4",
        "device": "cpu",
        "model": "m",
        "served-model-name": "Qwen",
        "tp-size": "1",
        "caches": "off",
        "base-url": "http://127.0.0.1:9",
        "prefill": "http://127.0.0.1:9,127.0.0.1:9",
        "decode": "http://127.0.0.1:9,127.0.0.1:9",
        **changed,
    }
    return [what, *(f"--{name}={value}" for name, value in values.items())]
