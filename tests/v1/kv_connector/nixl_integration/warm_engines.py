# SPDX-License-Identifier: Apache-2.0
"""Engines that start within seconds: forked from a process that has imported them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import warm_process
from pd_launcher import Engine
from pd_processes import LaunchedProcess

SWITCH_VARIABLE = "KVFORK_WARM_ENGINES"
"""Names the environment variable that, being 0, starts every engine by itself."""

_POLL_S = 0.02
_END_S = 10.0
# What is read later than at the start of an interpreter and by its first imports, or
# by nobody.
_LATE = ("VLLM_", "KVFORK_", "COMPARE_PROBE_", "PYTEST_", "PYTHONPATH")


class WarmEngine(Engine):
    """An engine that is forked, where its configuration allows that.

    It has an interpreter of its own where it is to have another one, or where its
    environment differs in what is read first.
    """

    def _launch(self, log: IO[bytes]) -> LaunchedProcess:
        environment = self._environment
        if (
            self.config.python == sys.executable
            and environment.get(SWITCH_VARIABLE) != "0"
        ):
            warm = WarmProcess.shared(environment)
            if warm.fits(environment):
                serve = self.command[self.command.index("serve") :]
                return warm.fork(["vllm", *serve], environment, Path(log.name))
        return super()._launch(log)


class WarmProcess:
    """The process that engines are forked from; it ends with this one.

    Args:
        environment: what it sees of the environment when it imports the engine.
    """

    _latest: WarmProcess | None = None
    _sharing = threading.Lock()

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._read = _first_read(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-P", warm_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._read,
            start_new_session=True,
            text=True,
        )

    @classmethod
    def shared(cls, environment: Mapping[str, str]) -> WarmProcess:
        """The only one, made with the environment of the first engine."""
        with cls._sharing:
            warm = cls._latest
            if (
                warm is None
                or warm.owner != os.getpid()
                or warm._process.poll() is not None
            ):
                warm = cls._latest = cls(environment)
            return warm

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether an engine with this environment would have imported the same."""
        return _first_read(environment) == self._read

    def fork(
        self, arguments: list[str], environment: Mapping[str, str], log: Path
    ) -> ForkedProcess:
        """Start an engine, which leads a session of its own.

        Raises:
            RuntimeError: the process to fork from has ended.
        """
        request = {
            "arguments": arguments,
            "environment": dict(environment),
            "log": str(log.resolve()),
        }
        return ForkedProcess(self, list(arguments), self.ask(request))

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the reply.

        Raises:
            RuntimeError: the process has ended.
        """
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            status = self._process.wait(_END_S)
            raise RuntimeError(
                f"the process that engines are forked from has ended with {status}; "
                f"{SWITCH_VARIABLE}=0 does without it"
            )
        return json.loads(line)


class ForkedProcess:
    """An engine's first process, as ``subprocess`` would show it."""

    def __init__(self, warm: WarmProcess, arguments: list[str], pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm
        self._arguments = arguments

    def poll(self) -> int | None:
        """Its exit status, or ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = self._warm.ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on after ``timeout`` seconds.
        """
        started = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - started > timeout:
                raise subprocess.TimeoutExpired(self._arguments, timeout)
            time.sleep(_POLL_S)
        return status


def _first_read(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if not name.startswith(_LATE)
    }
