# SPDX-License-Identifier: Apache-2.0
"""The systems under comparison, and how each is started on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compare_probe
from compare_counters import events
from compare_legs import Dialect, Target
from compare_probe.engine_probe import (
    FOLDER_VARIABLE,
    NAME_VARIABLE,
    NEUTRALISE_VARIABLE,
    SPIN_VARIABLE,
)
from compare_venv import BaseVenv
from fork_build.pins import REPOSITORY
from multiturn_engines import BENCH_SPEC, BLOCK_SIZE, MODEL_NAME
from multiturn_legs import Endpoint, Mode
from pd_launcher import (
    CONNECTORS,
    START_TIMEOUT_S,
    Engine,
    EngineConfig,
    Role,
    TransferConfig,
    transfer_config,
)
from pd_processes import stop_all, wait_all_ready
from tiny_model import tiny_model

CHUNK_TOKENS = 512
"""Tokens of a step: a long prompt is computed in several chunks."""

SPIN_S = "0.001"
"""How long an engine's process looks for a message without pause; 1 as shipped."""

SHIPPED_START_S = 120.0

_ROLES: Mapping[str, Role] = {"prefill": "kv_producer", "decode": "kv_consumer"}


class SystemMismatch(RuntimeError):
    """A system is not the one it should be; the text says what was found."""


@dataclass(frozen=True)
class System:
    """One row of the comparison.

    Attributes:
        mode: ``None`` is a single engine without a connector.
        inline: the decode engine runs its transfer loop on its forward thread.
        neutralised: the base's pinning and busy polling are taken from it.
        as_shipped: the engine's own polling is left to it.
    """

    name: str
    mode: Mode | None = None
    dialect: Dialect = "ours"
    inline: bool = False
    neutralised: bool = False
    as_shipped: bool = False


SINGLE = System("single")
SYSTEMS: tuple[System, ...] = (
    SINGLE,
    System("base-push", "push", "base", neutralised=True),
    System("our-push", "push"),
    System("base-pull", "pull", "base", neutralised=True),
    System("our-pull", "pull"),
    System("our-pull-inline", "pull", inline=True),
)
AS_SHIPPED: tuple[System, ...] = (
    System("base-push-as-shipped", "push", "base", as_shipped=True),
    System("base-pull-as-shipped", "pull", "base", as_shipped=True),
)


@dataclass(frozen=True)
class Sources:
    """Where the code under comparison lies.

    Attributes:
        base: needed for the base's systems only.
        ours: the folder of our ``vllm``; a copy stays as it is while the checkout
            is worked on.
    """

    base: BaseVenv | None
    ours: Path = REPOSITORY

    def folder(self, system: System) -> Path:
        """The folder that a system's ``vllm`` must come from.

        Raises:
            SystemMismatch: it is the base's, and there is none.
        """
        if system.dialect == "ours":
            return self.ours
        if self.base is None:
            raise SystemMismatch(f"{system.name} needs the base's environment")
        return self.base.packages


@dataclass(frozen=True)
class Fleet:
    """A system that runs.

    Attributes:
        engines: by role; a single engine's role is ``decode``.
        probes: the folder of its probe's files.
    """

    system: System
    target: Target
    engines: Mapping[str, Engine]
    probes: Path


@contextmanager
def fleet(
    system: System, sources: Sources, room: int, log_dir: Path, nice: int = 0
) -> Iterator[Fleet]:
    """Run a system's engines, ready for requests.

    Args:
        system: what is started.
        sources: where its code is.
        room: tokens of the longest prompt and its answer.
        log_dir: for logs and the probe's files.
        nice: priority of the engines, where others use the machine too.

    Raises:
        StartError: an engine did not become ready in time.
        SystemMismatch: an engine runs another connector than the system's.
    """
    probes = log_dir / "probes"
    probes.mkdir(parents=True, exist_ok=True)
    roles = ("decode",) if system.mode is None else ("prefill", "decode")
    engines = {
        role: Engine(role, _config(system, role, sources, room, probes), log_dir)
        for role in roles
    }
    try:
        for engine in engines.values():
            engine.start()
            if nice:
                prefer(engine.pid, nice)
        # As it is, the base may take for ever on few cores.
        patience = SHIPPED_START_S if system.as_shipped else START_TIMEOUT_S
        wait_all_ready(list(engines.values()), patience)
        _check_origin(system, sources, probes)
        yield Fleet(system, _target(system, engines), engines, probes)
    finally:
        stop_all(list(engines.values()))


def prefer(pid: int, nice: int) -> None:
    """Change the priority of a process and of those that it will start.

    Raises:
        SystemMismatch: the kernel does not allow it.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        # Where the kernel groups sessions, it weighs these and not the processes.
        autogroup = Path("/proc", str(pid), "autogroup")
        if autogroup.exists():
            autogroup.write_text(str(nice))
    except OSError as error:
        raise SystemMismatch(
            f"--nice {nice} cannot be set ({error}): run as root, or without it"
        ) from error


def _config(
    system: System, role: str, sources: Sources, room: int, probes: Path
) -> EngineConfig:
    paths = [str(Path(compare_probe.__file__).parent)]
    if system.dialect == "ours" and sources.ours != REPOSITORY:
        paths.append(str(sources.ours))
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        FOLDER_VARIABLE: str(probes),
        NAME_VARIABLE: role,
        NEUTRALISE_VARIABLE: "1" if system.neutralised else "0",
    }
    if not system.as_shipped:
        environment[SPIN_VARIABLE] = SPIN_S
    config = EngineConfig(
        model=str(tiny_model(BENCH_SPEC)),
        served_model_name=MODEL_NAME,
        block_size=BLOCK_SIZE,
        max_model_len=-(-room // BLOCK_SIZE) * BLOCK_SIZE,
        max_num_batched_tokens=CHUNK_TOKENS,
        environment=environment,
    )
    if system.mode is None:
        return config
    config = replace(config, transfer_config=_transfer(system, role, system.mode))
    if system.dialect == "base" and sources.base is not None:
        config = replace(config, python=str(sources.base.python))
    return config


def _transfer(system: System, role: str, mode: Mode) -> TransferConfig:
    extra: dict[str, Any] = {}
    if system.inline and role == "decode":
        extra["transfer_thread"] = False
    return transfer_config(
        CONNECTORS[mode], _ROLES[role], engine_id=_engine_id(role), extra_config=extra
    )


def _engine_id(role: str) -> str:
    return f"{role}-engine-001"


def _target(system: System, engines: Mapping[str, Engine]) -> Target:
    points = {
        role: Endpoint(engine.url, (engine.host, engine.side_channel_port))
        for role, engine in engines.items()
    }
    return Target(
        MODEL_NAME,
        points["decode"],
        points.get("prefill"),
        system.mode,
        system.dialect,
        _engine_id("prefill"),
    )


def _check_origin(system: System, sources: Sources, probes: Path) -> None:
    """The probe tells which file the connector was loaded from."""
    if system.mode is None:
        return
    folder = os.path.join(sources.folder(system), "vllm", "")
    for role in _ROLES:
        loaded = {
            event["file"]
            for event in events(probes, role)
            if event["event"] == "loaded"
        }
        if not loaded or not all(file.startswith(folder) for file in loaded):
            raise SystemMismatch(
                f"{system.name}: the {role} engine loaded its connector from "
                f"{sorted(loaded) or 'nowhere'}, expected a file in {folder}"
            )
