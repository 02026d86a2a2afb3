# SPDX-License-Identifier: Apache-2.0
"""Forks engines: a process that has imported the engine and runs nothing itself.

Most of an engine's start is three processes in turn that import the same modules. Run
as a script, this imports them once; each line on its standard input then asks for an
engine that starts from there, or for what became of one. An engine's own processes are
made as the engine makes them, but forked where a new interpreter would be started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import multiprocessing
import os
import random
import runpy
import sys
import traceback
from multiprocessing import context, forkserver, resource_tracker, spawn, util
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
MOST_PAGES = 1 << 24
"""Address space that is skipped, at most: 64 GiB in pages of 4 KiB."""

_skipped: list[mmap.mmap] = []


def requests() -> dict[str, Any] | None:
    """Answer requests until standard input ends; returns one in each new engine."""
    for name in MODULES:
        importlib.import_module(name)
    # Engines name their processes; the room for that is found before the environment
    # is replaced, which lies behind it.
    setproctitle.setproctitle("warm engine")
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            if "pid" in request:
                reply = _status(request["pid"])
            else:
                sys.stdout.flush()
                sys.stderr.flush()
                reply = os.fork()
                if not reply:
                    return request
            print(json.dumps(reply), file=replies, flush=True)
    return None


def _status(pid: int) -> int | None:
    """The exit status of an engine, if it has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


# ---- in the engine


def become(request: dict[str, Any]) -> None:
    """Make this process the engine of ``request``, and serve until that ends."""
    os.setsid()
    _redirect(request["log"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _take_python_path(os.environ.get("PYTHONPATH", ""))
    _skip_addresses()
    _fork_for_spawn()
    sys.argv = request["arguments"]
    from vllm.entrypoints.cli.main import main as serve

    serve()


def _take_python_path(folders: str) -> None:
    """Do what an interpreter does when it starts."""
    for folder in reversed([path for path in folders.split(os.pathsep) if path]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
        custom = Path(folder) / "sitecustomize.py"
        if custom.exists():
            runpy.run_path(str(custom))


def _redirect(log: str) -> None:
    """Let standard input be empty, and the output go to a file; close all else."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    _close_all_but(0, 1, 2)


def _close_all_but(*kept: int) -> None:
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _skip_addresses() -> None:
    """Put what this process allocates elsewhere than another fork's.

    Two engines whose caches lie at equal addresses would hide it if one took the
    other's address for its own.
    """
    size = random.randrange(1, MOST_PAGES) * mmap.PAGESIZE
    # Nobody may touch it, so it costs no memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    _skipped.append(mmap.mmap(-1, size, flags, prot=0))


def _fork_for_spawn() -> None:
    """Fork the processes that are to be spawned, from one that runs no thread."""
    _carry_environment()
    # That one takes over all that is changed here, so it is made last.
    contexts: dict[str, Any] = vars(context)["_concrete_contexts"]
    contexts["spawn"] = multiprocessing.get_context("forkserver")
    # An interpreter of its own, and the only one.
    resource_tracker.ensure_running()
    replaced = vars(util)
    plain = replaced["spawnv_passfds"]

    def fork_and_run(path: object, arguments: list[str], passed: list[int]) -> int:
        """Run the command that an interpreter was to be given."""
        replaced["spawnv_passfds"] = plain
        pid = os.fork()
        return pid or _run(arguments[-1], passed)

    replaced["spawnv_passfds"] = fork_and_run
    forkserver.set_forkserver_preload([])
    forkserver.ensure_running()


def _run(command: str, passed: list[int]) -> NoReturn:
    try:
        _close_all_but(0, 1, 2, *passed)
        # Processes that it forks ask it for further ones. It was forked while this
        # object was locked, and an interpreter of its own would know nothing of that.
        vars(forkserver)["_forkserver"].ensure_running = lambda: None
        exec(command, {})
    except SystemExit:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it must not go on as the engine
        traceback.print_exc()
    os._exit(1)


def _carry_environment() -> None:
    """Give a process its parent's environment of that moment, as spawning does."""
    replaced = vars(spawn)
    describe, prepare = replaced["get_preparation_data"], replaced["prepare"]

    def describe_all(name: str) -> dict[str, Any]:
        return {**describe(name), "environment": dict(os.environ)}

    def prepare_all(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data.pop("environment"))
        prepare(data)

    replaced["get_preparation_data"] = describe_all
    replaced["prepare"] = prepare_all


if __name__ == "__main__":
    wanted = requests()
    if wanted is not None:
        become(wanted)
