# SPDX-License-Identifier: Apache-2.0
"""The probe that the comparison puts into engines, and how it is read."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import compare_probe
from compare_counters import counters, cpu_times, events
from compare_probe.engine_probe import (
    FOLDER_VARIABLE,
    NAME_VARIABLE,
    NEUTRALISE_VARIABLE,
    SPIN_VARIABLE,
    Probe,
    bucket_end,
    bucket_of,
    watch_connectors,
    watch_pool,
)

BUSY_S = 0.02


def _burn(seconds: float = BUSY_S) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _connector_module() -> ModuleType:
    module = ModuleType("connectors")
    module.__file__ = "/somewhere/connectors.py"

    class Engine:
        def bind_connector_metadata(self, metadata: Any) -> None:
            pass

        def clear_connector_metadata(self) -> None:
            pass

    class Base(Engine):
        def wait_for_save(self) -> str:
            _burn()
            return "saved"

        def build_connector_meta(self, scheduler_output: Any) -> None:
            _burn()

        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            pass

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

    class Push(Base):
        def wait_for_save(self) -> str:
            _burn()
            return super().wait_for_save()

    for item in (Base, Push):
        item.__module__ = module.__name__
        setattr(module, item.__name__, item)
    return module


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path, "decode")


def test_a_buckets_end_is_in_it() -> None:
    for place in (0, 1, 30, 80):
        assert bucket_of(bucket_end(place) * 0.999) == place
    assert bucket_of(0.0) == 0
    assert bucket_of(1e9) == bucket_of(1e8)


def test_hooks_are_timed_once_however_they_call_each_other(
    probe: Probe, tmp_path: Path
) -> None:
    module = _connector_module()
    watch_connectors(probe, module)
    connector = module.Push()
    for _ in range(3):
        connector.bind_connector_metadata(None)
        assert connector.wait_for_save() == "saved"
    connector.bind_connector_metadata(None)

    found = counters(tmp_path, "decode")
    assert found.forward_steps == 3
    assert 6 * BUSY_S <= found.forward_cpu < 9 * BUSY_S
    assert found.forward_wall >= found.forward_cpu
    p99 = found.step_quantile(0.99)
    assert p99 is not None
    assert 2 * BUSY_S <= p99 < 4 * BUSY_S
    assert found.since(found).forward_cpu == 0.0
    assert found.since(found).step_quantile(0.5) is None
    (loaded,) = events(tmp_path, "decode")
    assert loaded["file"] == "/somewhere/connectors.py"


def test_a_requests_way_through_the_schedulers_is_noted(
    probe: Probe, tmp_path: Path
) -> None:
    module = _connector_module()
    watch_connectors(probe, module)
    connector = module.Push()
    request = SimpleNamespace(request_id="cmpl-x-0-1")
    connector.update_state_after_alloc(request, (), 0)
    connector.update_state_after_alloc(request, (), 127)
    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"y": 1}))
    for _ in range(2):
        connector.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens={"cmpl-x-0-1": 1})
        )
    assert connector.request_finished(request, []) == (False, None)

    told = events(tmp_path, "decode")[1:]
    assert [event["event"] for event in told] == ["asked", "resumed", "finished"]
    assert {event["id"] for event in told} == {"cmpl-x-0-1"}
    assert told[0]["tokens"] == 127
    assert [e["time"] for e in told] == sorted(e["time"] for e in told)
    assert counters(tmp_path, "decode").scheduler_cpu >= 3 * BUSY_S


class _Pool:
    num_gpu_blocks = 11

    def __init__(self) -> None:
        self.free = 10

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> int:
        self.free -= count
        return count

    def touch(self, blocks: int) -> None:
        self.free -= blocks

    def free_blocks(self, blocks: int) -> None:
        self.free += blocks


def test_blocks_in_use_are_added_up_over_time(probe: Probe, tmp_path: Path) -> None:
    module = ModuleType("pool")
    setattr(module, "BlockPool", _Pool)  # noqa: B010 - a module of no known names
    watch_pool(probe, module)
    pool = _Pool()
    began = time.monotonic()
    assert pool.get_new_blocks(3) == 3
    pool.touch(1)
    time.sleep(0.2)
    before = counters(tmp_path, "decode")
    assert before.blocks_used == 4
    pool.free_blocks(4)
    whole = time.monotonic() - began
    after = counters(tmp_path, "decode")
    assert after.blocks_used == 0
    assert 0.8 <= after.block_seconds <= 4 * whole
    time.sleep(0.05)
    assert counters(tmp_path, "decode").since(after).block_seconds == 0.0


def _python(folder: Path, code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                (str(Path(compare_probe.__file__).parent), str(folder))
            ),
            FOLDER_VARIABLE: str(folder),
            NAME_VARIABLE: "engine",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_PINS = """
    import os, types
    worker = types.ModuleType(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
    )
    exec("import os\\ndef pin(): os.sched_setaffinity(0, [core])", vars(worker))
    cores = os.sched_getaffinity(0)
    worker.core = min(cores)
    worker.pin()
    assert os.sched_getaffinity(0) == ({expected}), os.sched_getaffinity(0)
"""


def test_the_bases_worker_is_not_pinned_and_others_may_be(tmp_path: Path) -> None:
    _python(tmp_path, _PINS.format(expected="cores"), **{NEUTRALISE_VARIABLE: "1"})
    (event,) = events(tmp_path, "engine")
    assert event["event"] == "not pinned"
    _python(
        tmp_path, _PINS.format(expected="{min(cores)}"), **{NEUTRALISE_VARIABLE: "0"}
    )
    code = """
        import os
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [core])
        assert os.sched_getaffinity(0) == {core}
    """
    _python(tmp_path, code, **{NEUTRALISE_VARIABLE: "1"})
    assert len(events(tmp_path, "engine")) == 1


_SPINS = """
    import time
    from nixl_cu13._api import nixl_agent, nixl_agent_config
    agent = nixl_agent("probe", nixl_agent_config())
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(1.0)
    used = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert used < 0.25, used
"""


def test_a_calmed_progress_thread_leaves_the_core_to_others(tmp_path: Path) -> None:
    _python(tmp_path, _SPINS, **{NEUTRALISE_VARIABLE: "1"})
    (event,) = events(tmp_path, "engine")
    assert event == {**event, "event": "progress thread sleeps", "microseconds": 1000}


def _pool_module(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "v1" / "core"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "block_pool.py").write_text(
        "class BlockPool:\n"
        "    num_gpu_blocks = 5\n"
        "    def get_num_free_blocks(self): return 1\n"
        "    def get_new_blocks(self): pass\n"
        "    def touch(self): pass\n"
        "    def free_blocks(self): pass\n",
        encoding="utf-8",
    )


def test_a_module_is_watched_when_it_is_imported(tmp_path: Path) -> None:
    _pool_module(tmp_path)
    code = """
        from vllm.v1.core.block_pool import BlockPool
        BlockPool().touch()
    """
    _python(tmp_path, code)
    assert counters(tmp_path, "engine").blocks_used == 3


def test_a_module_is_watched_that_was_imported_before(tmp_path: Path) -> None:
    _pool_module(tmp_path)
    given = {FOLDER_VARIABLE: str(tmp_path), NAME_VARIABLE: "engine"}
    code = f"""
        from vllm.v1.core.block_pool import BlockPool
        from engine_probe import install
        install({given!r})
        BlockPool().touch()
    """
    _python(tmp_path, code, **{FOLDER_VARIABLE: ""})
    assert counters(tmp_path, "engine").blocks_used == 3


_WAITS = """
    import time, zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    made = SpinCondition(True, zmq.Context(), "inproc://x")
    time.sleep(0.01)
    cpu, wall, looks = time.thread_time(), time.monotonic(), 0
    while time.monotonic() < wall + 0.5:
        made.wait(timeout_ms=100)
        looks += 1
    used = (time.thread_time() - cpu) / 0.5
    assert looks > 100, looks
    assert used < 0.5, used
"""


def test_an_engines_processes_nap_between_looks(tmp_path: Path) -> None:
    _python(tmp_path, _WAITS, **{SPIN_VARIABLE: "0.001"})


def test_cpu_times_are_those_of_the_process_group() -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True
    )
    try:
        before = cpu_times(busy.pid)
        time.sleep(0.5)
        spent = cpu_times(busy.pid).since(before)
    finally:
        busy.kill()
        busy.wait()
    assert 0.01 < spent.total < 2.0
    assert spent.forward == 0.0
