# SPDX-License-Identifier: Apache-2.0
"""Measures an engine from inside, whichever connector it was installed with.

Every system under comparison gets the same probe, so what it costs is in every row.
Counters lie in a file that is mapped into memory, so reading them disturbs nobody;
what happens to a request is a line in another file.

It also takes from every engine, and from the base's connectors, what would decide the
comparison on a machine of few cores: see :func:`_spin_less`, :func:`_unpin` and
:func:`_calm`. The base's files stay as they are.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_VARIABLE = "COMPARE_PROBE_FOLDER"
NAME_VARIABLE = "COMPARE_PROBE_NAME"
NEUTRALISE_VARIABLE = "COMPARE_PROBE_NEUTRALISE"
SPIN_VARIABLE = "COMPARE_PROBE_SPIN_S"

# Places of the counters, each a float64; a histogram of steps follows them.
FORWARD_CPU = 0
FORWARD_WALL = 1
FORWARD_STEPS = 2
SCHEDULER_CPU = 3
BLOCK_SECONDS = 4
BLOCKS_USED = 5
USED_SINCE = 6
BLOCKS_TOTAL = 7
HISTOGRAM = 8
BUCKETS = 120
BUCKET_FROM_S = 1e-6
BUCKET_RATIO = 1.15
FIELDS = HISTOGRAM + BUCKETS

CALM_PROGRESS_US = 1000
"""Longest wait of a progress thread that is made to sleep."""

NAP_S = 0.0002
"""Pause between looks for a message."""

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_CONNECTOR = f"{_NIXL}.connector"
_PINNING = f"{_NIXL}.base_worker"
_BLOCK_POOL = "vllm.v1.core.block_pool"
_MESSAGES = "vllm.distributed.device_communicators.shm_broadcast"
_FORWARD_HOOKS = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
_SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
)
# The engine's own classes provide these; connectors inherit them.
_INHERITED = ("bind_connector_metadata", "clear_connector_metadata")
_Function = Callable[..., Any]


def bucket_of(seconds: float) -> int:
    """The histogram's bucket for a duration."""
    if seconds <= BUCKET_FROM_S:
        return 0
    place = math.ceil(math.log(seconds / BUCKET_FROM_S, BUCKET_RATIO))
    return min(place, BUCKETS - 1)


def bucket_end(place: int) -> float:
    """The longest duration that falls into a bucket, in seconds."""
    return BUCKET_FROM_S * BUCKET_RATIO**place


class Probe:
    """The counters and events of one process.

    Args:
        folder: where the files are made, when there is something to tell.
        name: the engine's.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._owner = 0
        self._values: memoryview[float] = memoryview(bytearray(8 * FIELDS)).cast("d")
        self._events = -1
        self._depth = 0
        self._step_cpu = 0.0
        self._in_step = False
        self._expected: set[str] = set()

    def values(self) -> memoryview[float]:
        """This process's counters; a forked child gets its own."""
        if self._owner != os.getpid():
            self._open()
        return self._values

    def event(self, kind: str, **facts: Any) -> None:
        """Write what happened, with the time."""
        self.values()
        line = {"event": kind, "time": time.monotonic(), **facts}
        os.write(self._events, (json.dumps(line) + "\n").encode())

    def _open(self) -> None:
        self._owner = os.getpid()
        stem = f"{self._name}-{self._owner}"
        with (self._folder / f"{stem}.counters").open("w+b") as file:
            file.truncate(8 * FIELDS)
            self._values = memoryview(mmap.mmap(file.fileno(), 8 * FIELDS)).cast("d")
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._events = os.open(self._folder / f"{stem}.events", flags, 0o644)

    # ---- the forward thread's and the scheduler's hooks

    def forward(self, name: str, hook: _Function) -> _Function:
        """Time a worker's hook; nested hooks count once."""

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return hook(*args, **kwargs)
            values = self.values()
            if name == "bind_connector_metadata":
                self._end_step(values)
            self._depth += 1
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                cpu = time.thread_time() - cpu
                values[FORWARD_WALL] += time.perf_counter() - wall
                values[FORWARD_CPU] += cpu
                self._step_cpu += cpu
                self._depth -= 1

        return timed

    def _end_step(self, values: memoryview[float]) -> None:
        if self._in_step:
            values[FORWARD_STEPS] += 1
            values[HISTOGRAM + bucket_of(self._step_cpu)] += 1
        self._in_step, self._step_cpu = True, 0.0

    def scheduler(self, name: str, hook: _Function) -> _Function:
        """Time a scheduler's hook, and note what it tells of a request."""
        notes: dict[str, _Function] = {
            "update_state_after_alloc": self._allocated,
            "build_connector_meta": self._scheduled,
            "request_finished": self._finished,
            "request_finished_all_groups": self._finished,
        }
        note = notes.get(name)

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return hook(*args, **kwargs)
            self._depth += 1
            if note is not None:
                note(*args, **kwargs)
            cpu = time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.values()[SCHEDULER_CPU] += time.thread_time() - cpu
                self._depth -= 1

        return timed

    def _allocated(
        self, _: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._expected.add(request.request_id)
            self.event("asked", id=request.request_id, tokens=num_external_tokens)

    def _scheduled(self, _: Any, scheduler_output: Any) -> None:
        if self._expected:
            for request_id in self._expected & set(
                scheduler_output.num_scheduled_tokens
            ):
                self._expected.discard(request_id)
                self.event("resumed", id=request_id)

    def _finished(self, _: Any, request: Any, *_blocks: Any) -> None:
        self._expected.discard(request.request_id)
        self.event("finished", id=request.request_id)

    # ---- blocks

    def pool(self, change: _Function) -> _Function:
        """Keep account of the blocks in use around a method that changes them."""

        @functools.wraps(change)
        def counted(pool: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return change(pool, *args, **kwargs)
            finally:
                self.blocks(pool.num_gpu_blocks, pool.get_num_free_blocks())

        return counted

    def blocks(self, total: int, free: int) -> None:
        """So many blocks are in use from now on; the null block is not counted."""
        values, now = self.values(), time.monotonic()
        if values[BLOCKS_TOTAL]:
            values[BLOCK_SECONDS] += values[BLOCKS_USED] * (now - values[USED_SINCE])
        values[BLOCKS_USED] = total - free - 1
        values[USED_SINCE] = now
        values[BLOCKS_TOTAL] = total - 1


class _Patcher(importlib.abc.MetaPathFinder):
    """Runs a function on a module once it is loaded."""

    def __init__(self, patches: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def install(environ: Mapping[str, str]) -> None:
    """Measure this process, and its children, once the engine is imported.

    What is imported already, where an engine is forked, is patched at once.
    """
    probe = Probe(Path(environ[FOLDER_VARIABLE]), environ.get(NAME_VARIABLE, "engine"))
    patches: dict[str, Callable[[ModuleType], None]] = {
        _BLOCK_POOL: lambda module: watch_pool(probe, module),
        _CONNECTOR: lambda module: watch_connectors(probe, module),
    }
    if spin := environ.get(SPIN_VARIABLE):
        patches[_MESSAGES] = lambda module: _spin_less(module, float(spin))
    if environ.get(NEUTRALISE_VARIABLE) == "1":
        for name in ("nixl_cu12", "nixl_cu13"):
            patches[f"{name}._api"] = lambda module: _calm(probe, module)
        _unpin(probe)
    for name in patches.keys() & sys.modules.keys():
        patches[name](sys.modules[name])
    sys.meta_path.insert(0, _Patcher(patches))


def watch_pool(probe: Probe, module: ModuleType) -> None:
    """Count the blocks that a pool of this module has in use."""
    for name in ("get_new_blocks", "touch", "free_blocks"):
        change = getattr(module.BlockPool, name)
        setattr(module.BlockPool, name, probe.pool(change))


def watch_connectors(probe: Probe, module: ModuleType) -> None:
    """Time the hooks of the connectors that this module defines."""
    probe.event("loaded", file=module.__file__)
    classes = [
        item
        for item in vars(module).values()
        if inspect.isclass(item)
        and item.__module__ == module.__name__
        and hasattr(item, "bind_connector_metadata")
    ]
    # Bases first, so that what a class inherits from another is wrapped once.
    for item in sorted(classes, key=lambda found: len(found.__mro__)):
        for names, wrap in (
            (_FORWARD_HOOKS, probe.forward),
            (_SCHEDULER_HOOKS, probe.scheduler),
        ):
            for name in names:
                first = name in _INHERITED and not set(item.__mro__[1:]) & set(classes)
                if name in vars(item) or first:
                    setattr(item, name, wrap(name, getattr(item, name)))


def _spin_less(module: ModuleType, seconds: float) -> None:
    """Have the engine's processes nap between looks for messages after that long.

    They look without pause for a second after each message: four processes of a pair,
    which leaves nothing of two cores to the computation that is measured. Napping
    within that second, rather than ending it, keeps them from the engine's other way
    of waiting, in which a wake-up can be missed for five seconds.
    """
    original = module.SpinCondition.wait

    @functools.wraps(original)
    def wait(condition: Any, *args: Any, **kwargs: Any) -> Any:
        silence = time.monotonic() - condition.last_read
        if seconds < silence <= condition.busy_loop_s:
            time.sleep(NAP_S)
            return None
        return original(condition, *args, **kwargs)

    module.SpinCondition.wait = wait


def _unpin(probe: Probe) -> None:
    """Ignore that the base's worker asks for one core of its own.

    On CPU it gives its forward thread the last core of each NUMA node: two engines
    on one small machine would share that core.
    """
    original = os.sched_setaffinity

    def guarded(pid: int, cores: Any) -> None:
        if sys._getframe(1).f_globals.get("__name__") == _PINNING:
            probe.event("not pinned", cores=sorted(cores))
            return
        original(pid, cores)

    os.sched_setaffinity = guarded


def _calm(probe: Probe, api: ModuleType) -> None:
    """Let NIXL's progress thread wait for events instead of polling without pause.

    Its Python binding offers no setting for that.
    """
    original = api.nixlBind.nixlAgent

    def create(name: str, config: Any) -> Any:
        config.pthrDelay = CALM_PROGRESS_US
        probe.event("progress thread sleeps", microseconds=CALM_PROGRESS_US)
        return original(name, config)

    api.nixlBind.nixlAgent = create
