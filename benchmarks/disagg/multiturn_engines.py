# SPDX-License-Identifier: Apache-2.0
"""Starts the engines of the multi-turn benchmark on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from multiturn_legs import Endpoint, Mode
from multiturn_run import Fleet
from pd_launcher import (
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    bidirectional_transfer_config,
)
from pd_processes import stop_all, wait_all_ready
from tiny_model import TinySpec

MODEL_NAME = "model"
BLOCK_SIZE = 32

# One thread computes 2,400 tokens of it in more than a second, and their KV (12 KiB a
# token) moves in some tens of milliseconds: the relation of large models on GPUs.
BENCH_SPEC = TinySpec(
    layers=6, hidden=768, heads=12, kv_heads=4, head_dim=64, intermediate=2048
)
_REPORTS = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")


def engine_config(model: Path, max_model_len: int) -> EngineConfig:
    """What all engines share: they tell of each request, and can be reset."""
    return EngineConfig(
        model=str(model),
        served_model_name=MODEL_NAME,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        extra_arguments=_REPORTS,
        environment=MappingProxyType({"VLLM_SERVER_DEV_MODE": "1"}),
    )


@contextmanager
def local_fleet(
    mode: Mode, config: EngineConfig, p_prefix_caching: Sequence[bool], log_dir: Path
) -> Iterator[Fleet]:
    """Run a decode engine, and a prefill engine for each way of prefix caching.

    Raises:
        StartError: one of them did not become ready in time.
    """
    transfer = {
        role: bidirectional_transfer_config(mode, role)
        for role in ("kv_producer", "kv_consumer")
    }
    prefill = {
        caching: Engine(
            f"{mode}-prefill-{'cached' if caching else 'uncached'}",
            replace(
                config, prefix_caching=caching, transfer_config=transfer["kv_producer"]
            ),
            log_dir,
        )
        for caching in p_prefix_caching
    }
    decode = Engine(
        f"{mode}-decode",
        replace(config, transfer_config=transfer["kv_consumer"]),
        log_dir,
    )
    engines = [*prefill.values(), decode]
    try:
        for engine in engines:
            engine.start()
        wait_all_ready(engines, START_TIMEOUT_S)
        yield Fleet(
            mode,
            config.served_model_name,
            {caching: _endpoint(engine) for caching, engine in prefill.items()},
            _endpoint(decode),
        )
    finally:
        stop_all(engines)


def _endpoint(engine: Engine) -> Endpoint:
    return Endpoint(engine.url, (engine.host, engine.side_channel_port))
