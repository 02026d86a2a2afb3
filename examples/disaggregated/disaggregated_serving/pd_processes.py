# SPDX-License-Identifier: Apache-2.0
"""Server processes that never outlive the program that started them.

Each server leads a process group of its own, because an engine spawns more
processes. Three things end the group: ``stop``, the interpreter's exit, and a
watcher process that notices when the program was killed without a chance to
clean up. Run as a script, this module is that watcher.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
STOP_GRACE_S = 20.0
EXIT_GRACE_S = 5.0
KILL_WAIT_S = 10.0
LOG_TAIL_LINES = 30

# Below the range from which the kernel takes ports for outgoing connections, so
# that a port stays free during the half minute in which an engine loads.
_PORTS = range(20000, 32000)
_issued_ports: set[int] = set()

_LOG_LINE = re.compile(r"\[[\w.]+:\d+\]\s+(?P<text>\S.*)$")
_LOG_TAIL_BYTES = 16384


class StartError(RuntimeError):
    """A server did not become ready; the text ends with the tail of its log."""


@dataclass(frozen=True)
class Stage:
    """How far a starting server has come; ``seconds`` is since its start."""

    name: str
    seconds: float
    text: str
    ready: bool


Progress = Callable[[Sequence[Stage]], None]


class LaunchedProcess(Protocol):
    """What is needed of a process that was started, as of ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Its id, which is free again only after its exit status was asked for."""

    def poll(self) -> int | None:
        """Its exit status, or ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status."""


class ServerProcess:
    """One HTTP server in a process group of its own, logging to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log_path: Path,
        ready_path: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.host = LOOPBACK
        self.port = port
        self.log_path = log_path
        self.started_at = 0.0
        self._ready_path = ready_path
        self._environment = dict(os.environ if environment is None else environment)
        self._process: LaunchedProcess | None = None
        self._gone = False

    @property
    def address(self) -> str:
        """``host:port`` of the HTTP server."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of the HTTP server."""
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        """Process id of the group's leader.

        Raises:
            RuntimeError: the server was not started.
        """
        if self._process is None:
            raise RuntimeError(f"{self.name} is not started: call start() first")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the leader, or ``None`` while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Whether the leader is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server; returns at once.

        Raises:
            RuntimeError: it was started before.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.name} is started already (pid {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        watcher = _Watcher.shared()
        with self.log_path.open("wb") as log:
            self._process = self._launch(log)
        self.started_at = time.monotonic()
        watcher.add(self.pid)
        _started.append(self)

    def _launch(self, log: IO[bytes]) -> LaunchedProcess:
        return subprocess.Popen(
            self.command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stage(self, ready: bool = False) -> Stage:
        """Return how far the server has come, from its log."""
        seconds = time.monotonic() - self.started_at
        return Stage(self.name, seconds, _last_message(self.log_path), ready)

    def answers(self, timeout: float = 2.0) -> bool:
        """Whether the readiness path returns 200 within ``timeout`` seconds."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("GET", self._ready_path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self, timeout: float, progress: Progress | None = None) -> None:
        """Wait until the server answers; see ``wait_all_ready``."""
        wait_all_ready([self], timeout, progress)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return "\n".join(_tail(self.log_path).splitlines()[-lines:])

    def request_stop(self) -> None:
        """Ask the server to end, without waiting for it."""
        if self.running:
            # A stopped process would leave the request unread.
            self.send_signal(signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """End the server and its whole group; does nothing if it is not running.

        What is left ``grace`` seconds after the request is killed.

        Raises:
            RuntimeError: the group outlived SIGKILL.
        """
        if self._process is None or self._gone:
            return
        try:
            self.request_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
            if not self.running:
                # The others end by themselves once their leader has gone.
                _wait_group_gone(self.pid, min(grace, 3.0))
        finally:
            # Also on an interrupt: nothing may be left then.
            self.send_signal(signal.SIGKILL)
            self._process.wait(KILL_WAIT_S)
            self._gone = _wait_group_gone(self.pid, KILL_WAIT_S)
            if self._gone:
                _started.remove(self)
                _Watcher.shared().remove(self.pid)
        if not self._gone:
            raise RuntimeError(
                f"{self.name}: processes of group {self.pid} outlived SIGKILL for "
                f"{KILL_WAIT_S:.0f} s: {group_members(self.pid)}"
            )


def wait_all_ready(
    servers: Sequence[ServerProcess], timeout: float, progress: Progress | None = None
) -> None:
    """Wait until every server answers.

    ``progress`` is called about five times a second with the stage of each.

    Raises:
        StartError: one of them ended, or ``timeout`` seconds passed.
    """
    deadline = time.monotonic() + timeout
    waiting = list(servers)
    while True:
        for server in waiting:
            if not server.running:
                raise StartError(
                    f"{server.name} ended with status {server.returncode} before it "
                    f"was ready. Its log is {server.log_path}, which ends:\n"
                    f"{server.log_tail()}"
                )
        waiting = [server for server in waiting if not server.answers()]
        if progress is not None:
            progress([one.stage(ready=one not in waiting) for one in servers])
        if not waiting:
            return
        if time.monotonic() > deadline:
            late = waiting[0]
            raise StartError(
                f"{late.name} was not ready within {timeout:.0f} s: give it more time, "
                f"or free the machine's cores. Its log is {late.log_path}, which "
                f"ends:\n{late.log_tail()}"
            )
        time.sleep(POLL_S)


def stop_all(servers: Sequence[ServerProcess], grace: float = STOP_GRACE_S) -> None:
    """Stop several servers side by side; all are tried even if one fails.

    Raises:
        ExceptionGroup: what went wrong, one for each server.
    """
    errors: list[Exception] = []
    deadline = time.monotonic() + grace
    try:
        for server in servers:
            server.request_stop()
    finally:
        for server in servers:
            try:
                server.stop(max(0.0, deadline - time.monotonic()))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                errors.append(error)
    if errors:
        raise ExceptionGroup("servers could not be stopped", errors)


def free_ports(count: int) -> list[int]:
    """Return ``count`` loopback ports that are free and were not returned before.

    Raises:
        RuntimeError: there are no more.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        if port not in _issued_ports and _can_bind(port):
            _issued_ports.add(port)
            found.append(port)
    if len(found) < count:
        raise RuntimeError(
            f"no {count} free ports in {_PORTS.start}-{_PORTS.stop - 1} on {LOOPBACK}"
        )
    return found


def free_port_range(count: int) -> int:
    """Return the first of ``count`` free loopback ports in a row.

    Raises:
        RuntimeError: there are none.
    """
    while True:
        (first,) = free_ports(1)
        others = range(first + 1, first + count)
        if all(port not in _issued_ports and _can_bind(port) for port in others):
            _issued_ports.update(others)
            return first


def group_members(group: int) -> list[int]:
    """Return the ids of the live processes in a process group."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        # The command in parentheses may hold blanks; state and group follow it.
        state, _parent, of_group = text.rpartition(")")[2].split()[:3]
        if int(of_group) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def _wait_group_gone(group: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _last_message(path: Path) -> str:
    for line in reversed(_tail(path).splitlines()):
        match = _LOG_LINE.search(line)
        if match:
            return match["text"]
    return "starting"


class _Watcher:
    """A process that ends the groups it was told of when this one has died."""

    _instance: _Watcher | None = None
    _lock = threading.RLock()

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @classmethod
    def shared(cls) -> _Watcher:
        with cls._lock:
            watcher = cls._instance
            # A forked child must not write into its parent's pipe.
            if watcher is None or watcher.owner != os.getpid():
                watcher = cls._instance = cls()
            elif watcher._process.poll() is not None:
                watcher = cls._instance = cls()
                for server in _started:
                    watcher.add(server.pid)
            return watcher

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._write(f"-{group}\n")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(EXIT_GRACE_S + 2 * KILL_WAIT_S)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


_started: list[ServerProcess] = []


@atexit.register
def _stop_at_exit() -> None:
    watcher = _Watcher._instance
    if watcher is None or watcher.owner != os.getpid():
        return
    try:
        stop_all(list(_started), EXIT_GRACE_S)
    finally:
        watcher.close()


def _watch() -> None:
    """End every group announced on standard input once that is closed."""
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for number, wait in ((signal.SIGTERM, EXIT_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
                os.killpg(group, number)
        deadline = time.monotonic() + wait
        while groups and time.monotonic() < deadline:
            groups = {group for group in groups if group_members(group)}
            time.sleep(0.05)


if __name__ == "__main__":
    _watch()
