# SPDX-License-Identifier: Apache-2.0
"""What the kit starts it ends, with its children; what it did not start it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kit_processes
from kit_processes import KitError, Record
from pd_processes import free_ports

TIMEOUT_S = 20.0
SLEEPER = "import time; time.sleep(600)"
# A server with a child, neither of which ends when it is asked to.
STUBBORN = (
    "import signal, subprocess, sys, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); "
    "print('up', flush=True); time.sleep(600)"
)
WEB = (
    "import http.server, sys; "
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), "
    "type('H', (http.server.BaseHTTPRequestHandler,), "
    "{'do_GET': lambda self: (self.send_response(200), self.end_headers()), "
    "'log_message': lambda *a: None})).serve_forever()"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """State of servers, which are gone afterwards."""
    state = tmp_path / "state"
    yield state
    for record in kit_processes.records(state):
        kit_processes.stop(record, state, grace=0.0)


def start(folder: Path, name: str, code: str, *arguments: str) -> Record:
    command = [sys.executable, "-c", code, *arguments]
    return kit_processes.start(name, command, folder / f"{name}.log", folder)


def wait_for(log: str, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in Path(log).read_text():
        assert time.monotonic() < deadline, Path(log).read_text()
        time.sleep(0.02)


def test_a_server_is_ended_with_its_children(folder: Path) -> None:
    record = start(folder, "prefill", STUBBORN)
    wait_for(record.log, "up")
    deadline = time.monotonic() + TIMEOUT_S
    while len(record.members()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)

    kit_processes.stop(record, folder, grace=0.2)

    assert record.members() == []
    assert not record.running()
    assert kit_processes.records(folder) == []


def test_the_log_of_the_start_before_is_kept(folder: Path) -> None:
    first = start(folder, "decode", "print('this is why')")
    wait_for(first.log, "this is why")
    kit_processes.stop(first, folder)
    second = start(folder, "decode", "print('again')")

    wait_for(second.log, "again")
    assert Path(f"{second.log}.old").read_text() == "this is why\n"


def test_children_of_a_dead_server_are_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit_processes, "CHILDREN_S", 0.2)
    record = start(folder, "decode", STUBBORN)
    wait_for(record.log, "up")
    os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while record.running():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert record.members()

    kit_processes.stop(record, folder, grace=0.2)

    assert record.members() == []


@pytest.mark.parametrize("change", ["started", "boot"])
def test_an_id_that_is_somebody_elses_by_now_is_left_alone(
    folder: Path, change: str
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        start_new_session=True,
    )
    try:
        stat = kit_processes._stat(other.pid)
        assert stat is not None
        boot = kit_processes._boot_id()
        own = Record("prefill", other.pid, stat.started, boot, "", [])
        # With the right values it would be ended.
        assert own.running()
        assert own.members() == [other.pid]
        stale = (
            replace(own, started=stat.started - 1)
            if change == "started"
            else replace(own, boot="another")
        )
        folder.mkdir()
        stale.save(folder)

        status = kit_processes.main(
            ["stop", "--state-dir", str(folder), "--kind", "server"]
        )

        assert status == 0
        assert kit_processes.records(folder) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(TIMEOUT_S)


def test_one_name_runs_once(folder: Path) -> None:
    first = start(folder, "proxy", SLEEPER)

    with pytest.raises(KitError, match=r"runs already .*cleanup\.sh proxy"):
        start(folder, "proxy", SLEEPER)

    assert first.running()
    kit_processes.stop(first, folder, grace=TIMEOUT_S)
    assert start(folder, "proxy", SLEEPER).pid != first.pid


def test_only_the_kind_that_is_named_is_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, server = start(folder, "proxy", SLEEPER), start(folder, "decode-2", SLEEPER)

    assert (
        kit_processes.main(["stop", "--state-dir", str(folder), "--kind", "proxy"]) == 0
    )

    assert not proxy.running()
    assert server.running()
    assert capsys.readouterr().out == "proxy: ended\n"
    kit_processes.main(["list", "--state-dir", str(folder)])
    assert f"decode-2 runs: pid {server.pid}" in capsys.readouterr().out


def run_start(
    folder: Path, port: int, code: str, *arguments: str, timeout: str = "20"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, kit_processes.__file__, "start"]
    command += ["--state-dir", str(folder), "--name", "prefill"]
    command += ["--log", str(folder / "log"), "--timeout", timeout]
    command += ["--health", f"http://127.0.0.1:{port}/health", "--"]
    command += [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )


def test_start_returns_when_the_server_answers(folder: Path) -> None:
    (port,) = free_ports(1)

    done = run_start(folder, port, WEB, str(port))

    assert done.returncode == 0, done.stderr
    (record,) = kit_processes.records(folder)
    assert f"prefill: pid {record.pid}, log {folder / 'log'}" in done.stdout
    assert record.running()
    # Whoever answers there already is not taken for the new one, nor ended.
    kit_processes.record_path(folder, "prefill").rename(folder / "decode.pid")
    again = run_start(folder, port, WEB, str(port))
    assert again.returncode == 1
    assert "is left alone" in again.stderr
    assert record.running()


@pytest.mark.parametrize(
    ("code", "timeout", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", "20", "no such model"),
        (SLEEPER, "0.5", "did not answer at"),
    ],
)
def test_a_server_that_does_not_answer_is_not_left_behind(
    folder: Path, code: str, timeout: str, said: str
) -> None:
    (port,) = free_ports(1)

    done = run_start(folder, port, code, timeout=timeout)

    assert done.returncode == 1
    assert said in done.stderr
    assert kit_processes.records(folder) == []
    assert not list(folder.glob("*.pid"))


def test_an_interrupted_start_leaves_nothing(folder: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, kit_processes.__file__, "start", "--name", "single"]
    command += ["--state-dir", str(folder), "--log", str(folder / "log")]
    command += ["--health", f"http://127.0.0.1:{port}/", "--"]
    command += [sys.executable, "-c", SLEEPER]
    starting = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(folder.glob("single.pid")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (record,) = kit_processes.records(folder)

    starting.terminate()

    assert starting.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not record.members()
    assert kit_processes.records(folder) == []


def test_a_file_that_is_no_record_is_named(folder: Path) -> None:
    folder.mkdir()
    path = folder / "prefill.pid"
    path.write_text("17\n")
    with pytest.raises(KitError, match="is no record"):
        kit_processes.records(folder)
    path.write_text(json.dumps({"pid": 17}))
    with pytest.raises(KitError, match="is no record"):
        kit_processes.records(folder)
    path.unlink()
