# SPDX-License-Identifier: Apache-2.0
"""The engines of the distributed tests: what they are, and one room for them all.

Engines take long to start and much of a small machine, so a room keeps those that
the next test needs, stops the others first, and seldom holds more than two.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import compare_probe
from compare_probe.engine_probe import FOLDER_VARIABLE, SPIN_VARIABLE
from pd_launcher import (
    CONNECTORS,
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    Mode,
    Pair,
    Role,
    Router,
    TransferConfig,
    transfer_config,
)
from pd_processes import ServerProcess, stop_all, wait_all_ready
from tiny_audio import tiny_audio
from tiny_lora import tiny_lora
from tiny_model import TinySpec, default_folder, tiny_model
from warm_engines import WarmEngine

SPEC = TinySpec()
WINDOW_SPEC = TinySpec(window=100)
"""Layers that look back over all and layers that do over three blocks have block tables
of their own."""
BLOCK_SIZE = 32
OTHER_BLOCK_SIZE = 64
BLOCK_BYTES = 2 * 4 * SPEC.layers * SPEC.kv_heads * SPEC.head_dim * BLOCK_SIZE
"""Bytes of one block: keys and values of all layers as float32."""

MAX_BATCHED_TOKENS = 512
# Room for three of the longest prompts at a time: the caches run full.
NUM_BLOCKS = 320
LAYER_GROUPS = 3
ADAPTER = "adapter"
FEATURE_ARGUMENTS = (
    "--enable-prompt-embeds",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
LEASE_S = 9.0
"""Longer than the base's worker may miss a step that it was not woken for: 5 s."""
SHUTDOWN_S = 60
WORKER_SHUTDOWN_S = 20
HANDSHAKE_TIMEOUT_S = 3.0
LOCK_PATH = Path(tempfile.gettempdir()) / "kvfork-engines.lock"
LOCK_TIMEOUT_S = 1800.0
ROUTER_TIMEOUT_S = 60.0

SPIN_S = "0.001"
"""How long workers look for a message without pause; there are more than cores."""

_HERE = Path(__file__).resolve().parent
_PROBE = Path(compare_probe.__file__).parent

_BASE = EngineConfig(
    model="",
    block_size=BLOCK_SIZE,
    max_num_batched_tokens=MAX_BATCHED_TOKENS,
    num_gpu_blocks=NUM_BLOCKS,
    # Long prompts are computed side by side and in many chunks, and are admitted
    # before there is room for all of them: this is what makes P preempt.
    extra_arguments=(
        "--long-prefill-token-threshold=128",
        "--no-scheduler-reserve-full-isl",
    ),
)
_ROLES: dict[str, Role] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def engine_config(name: str, trace: Path) -> EngineConfig:
    """Return the configuration behind a name; ``trace`` gets its hand-offs.

    ``single`` is an engine without a connector. Other names are
    ``<mode>-<role>[-<variant>]``, for example ``push-prefill-noisy``, or
    ``pull-decode-tp-2`` for one of two ranks.
    """
    base = replace(_BASE, model=str(tiny_model(SPEC)))
    if name == "single":
        return replace(base, num_gpu_blocks=1000)
    mode_text, role_name, *variants = name.split("-")
    mode, role = cast(Mode, mode_text), _ROLES[role_name]
    extra = {
        "kv_lease_duration": LEASE_S,
        "handshake_timeout": HANDSHAKE_TIMEOUT_S,
        "handoff_trace_file": str(trace),
    }
    own = transfer_config(CONNECTORS[mode], role, extra_config=extra)
    match variants:
        case []:
            return replace(base, transfer_config=own)
        case ["otherblocks"]:
            return _of_other_blocks(replace(base, transfer_config=own))
        case ["narrow", _]:
            # One request at a time; several such engines are told apart by a number.
            return replace(base, transfer_config=own, max_num_seqs=1)
        case ["multi"]:
            return replace(base, transfer_config=_multi(own, role))
        case ["windows"]:
            return replace(
                base, transfer_config=own, model=str(tiny_model(WINDOW_SPEC))
            )
        case ["features"]:
            folder = default_folder() / f"tiny-lora-{SPEC.key()}"
            return replace(
                base,
                transfer_config=own,
                adapters={ADAPTER: str(tiny_lora(SPEC, folder))},
                extra_arguments=(*base.extra_arguments, *FEATURE_ARGUMENTS),
            )
        case ["audio"]:
            folder = default_folder() / f"tiny-audio-{SPEC.key()}"
            return replace(
                base, transfer_config=own, model=str(tiny_audio(SPEC, folder))
            )
        case ["speculating"]:
            return replace(
                base,
                transfer_config=own,
                extra_arguments=(
                    *base.extra_arguments,
                    f"--speculative-config={json.dumps(SPECULATION)}",
                ),
            )
        case ["uni"]:
            # The base's own switch for an executor without worker processes.
            alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            return replace(
                base, transfer_config=own, environment=MappingProxyType(alone)
            )
        case ["draining"]:
            more = f"--shutdown-timeout={SHUTDOWN_S}"
            return replace(
                base,
                transfer_config=own,
                extra_arguments=(*base.extra_arguments, more),
                environment=MappingProxyType(
                    {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_SHUTDOWN_S)}
                ),
            )
        case ["dp", size]:
            return replace(base, transfer_config=own, data_parallel_size=int(size))
        case [("tp" | "pp") as kind, size]:
            return _of_ranks(replace(base, transfer_config=own), kind, int(size), trace)
        case ["turns"]:
            return _conversing(replace(base, transfer_config=own), role)
        case ["turns", "windows"]:
            windowed = replace(base, model=str(tiny_model(WINDOW_SPEC)))
            return _conversing(replace(windowed, transfer_config=own), role)
        case ["turns", "otherblocks"]:
            return _conversing(
                _of_other_blocks(replace(base, transfer_config=own)), role
            )
        case ["turns", ("tp" | "pp") as kind, size]:
            both = {**own, "kv_role": "kv_both"}
            talking = _conversing(replace(base, transfer_config=both), role)
            return _of_ranks(talking, kind, int(size), trace)
        case ["noisy"]:
            return replace(
                base,
                transfer_config=_noisy(own, mode),
                environment=MappingProxyType({"PYTHONPATH": _python_path()}),
            )
    raise ValueError(f"no engine is called {name!r}")


def _of_other_blocks(config: EngineConfig) -> EngineConfig:
    return replace(
        config,
        block_size=OTHER_BLOCK_SIZE,
        num_gpu_blocks=NUM_BLOCKS * BLOCK_SIZE // OTHER_BLOCK_SIZE,
    )


def _of_ranks(config: EngineConfig, kind: str, size: int, trace: Path) -> EngineConfig:
    """An engine of several worker processes, which nap where they would spin."""
    more = [f"--tensor-parallel-size={size}"]
    if kind == "pp":
        # The base's later stages lack a buffer on CPU that its warm-up makes, which
        # --enforce-eager leaves out; tracing compiles nothing.
        more = [f"--pipeline-parallel-size={size}", "-cc.mode=2", "-cc.backend=eager"]
    return replace(
        config,
        enforce_eager=kind != "pp",
        extra_arguments=(*config.extra_arguments, *more),
        environment=MappingProxyType(
            {
                **config.environment,
                "PYTHONPATH": str(_PROBE),
                FOLDER_VARIABLE: str(trace.parent),
                SPIN_VARIABLE: SPIN_S,
            }
        ),
    )


def _conversing(config: EngineConfig, role: Role) -> EngineConfig:
    """Keeps and reads back conversations; the prefill side caches nothing itself."""
    assert config.transfer_config is not None
    extra = {
        **config.transfer_config["kv_connector_extra_config"],
        "bidirectional_kv_xfer": True,
    }
    caching = () if role == "kv_consumer" else ("--no-enable-prefix-caching",)
    return replace(
        config,
        transfer_config={**config.transfer_config, "kv_connector_extra_config": extra},
        extra_arguments=(*config.extra_arguments, *caching),
        # Offers /reset_prefix_cache.
        environment=MappingProxyType({"VLLM_SERVER_DEV_MODE": "1"}),
    )


def _multi(own: TransferConfig, role: Role) -> TransferConfig:
    """Ours as the only child; the prefill side hands layers over in groups."""
    if role == "kv_producer":
        extra = own["kv_connector_extra_config"]
        grouped = {**extra, "push_layer_groups": LAYER_GROUPS}
        own = {**own, "kv_connector_extra_config": grouped}
    return transfer_config("MultiConnector", role, extra_config={"connectors": [own]})


def _noisy(own: TransferConfig, mode: Mode) -> TransferConfig:
    classes = {"push": "NoisyPushConnector", "pull": "NoisyPullConnector"}
    return {
        **own,
        "kv_connector": classes[mode],
        "kv_connector_module_path": "noisy_connector",
    }


def _python_path() -> str:
    old = os.environ.get("PYTHONPATH")
    return f"{_HERE}{os.pathsep}{old}" if old else str(_HERE)


class EngineRoom:
    """Runs the engines that are asked for, and no others.

    Args:
        log_dir: where every server writes its log, and all engines their hand-offs.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.trace = log_dir / "handoffs.jsonl"
        self._engines: dict[str, Engine] = {}
        self._router: tuple[tuple[str, ...], Router] | None = None
        self._starts = 0

    def single(self) -> Engine:
        """Run the engine without a connector, alone."""
        return self._run("single")[0]

    def pair(self, mode: Mode, prefill: str, decode: str) -> Pair:
        """Run two engines and the router of ``mode`` in front of them.

        Raises:
            StartError: one of them did not become ready in time.
        """
        first, (second,), router = self.crew(mode, prefill, (decode,))
        return Pair(first, second, router)

    def crew(
        self,
        mode: Mode,
        prefill: str,
        decode: Sequence[str],
        router_arguments: tuple[str, ...] = (),
    ) -> tuple[Engine, list[Engine], Router]:
        """Run one prefill engine, several decode engines and their router.

        Raises:
            StartError: one of them did not become ready in time.
        """
        source, *sinks = self._run(prefill, *decode)
        key = (mode, prefill, *decode, *router_arguments)
        if self._router is None or self._router[0] != key:
            self._stop_router()
            name = self._log_name(f"{mode}-router")
            router = Router(
                name,
                mode,
                [source],
                sinks,
                self.log_dir,
                router_arguments,
                multiturn="-turns" in prefill,
            )
            self._router = (key, router)
            router.start()
            router.wait_ready(ROUTER_TIMEOUT_S)
        return source, sinks, self._router[1]

    def servers(self) -> list[ServerProcess]:
        """What runs, for a look at the logs."""
        routers = [self._router[1]] if self._router is not None else []
        return [*self._engines.values(), *routers]

    def close(self) -> None:
        """Stop everything."""
        try:
            self._stop_router()
        finally:
            engines = list(self._engines.values())
            self._engines.clear()
            stop_all(engines)

    def _run(self, *names: str) -> list[Engine]:
        unwanted = [
            name
            for name, engine in self._engines.items()
            if name not in names or not engine.running
        ]
        if unwanted or set(names) - set(self._engines):
            self._stop_router()
        stop_all([self._engines.pop(name) for name in unwanted])
        missing = [name for name in names if name not in self._engines]
        for name in missing:
            config = engine_config(name, self.trace)
            engine = WarmEngine(self._log_name(name), config, self.log_dir)
            self._engines[name] = engine
            engine.start()
        if missing:
            started = time.monotonic()
            wait_all_ready([self._engines[name] for name in missing], START_TIMEOUT_S)
            seconds = time.monotonic() - started
            print(f"\nstarted {', '.join(missing)} in {seconds:.0f} s")
        return [self._engines[name] for name in names]

    def _stop_router(self) -> None:
        if self._router is not None:
            _, router = self._router
            self._router = None
            router.stop()

    def _log_name(self, name: str) -> str:
        self._starts += 1
        return f"{self._starts:02d}-{name}"


@contextlib.contextmanager
def engines_lock(
    path: Path = LOCK_PATH, timeout: float = LOCK_TIMEOUT_S
) -> Iterator[None]:
    """Hold the lock under which this machine's test engines run.

    Raises:
        TimeoutError: another run held it for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another test run has held {path} for {timeout:.0f} s; end "
                        "it, or wait for it"
                    ) from None
                time.sleep(1.0)
        yield


def log_tails(servers: Sequence[ServerProcess], lines: int) -> list[tuple[str, str]]:
    """Return a title and the last lines of each server's log."""
    return [
        (f"{server.name} ({server.log_path})", server.log_tail(lines))
        for server in servers
    ]


def side_channel_params(prefill: Engine) -> dict[str, Any]:
    """Return how a decode engine finds ``prefill``, as a push router says it."""
    return {
        "remote_engine_id": None,
        "remote_host": prefill.host,
        "remote_port": prefill.side_channel_port,
        "tp_size": 1,
        "pp_size": 1,
    }
