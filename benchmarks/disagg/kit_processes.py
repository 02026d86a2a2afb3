# SPDX-License-Identifier: Apache-2.0
"""Servers that outlive the command that started them, and how they are ended.

    python kit_processes.py start --state-dir DIR --name prefill --log FILE \
        --health http://127.0.0.1:8100/health -- vllm serve …
    python kit_processes.py stop --state-dir DIR --name prefill
    python kit_processes.py list --state-dir DIR

Each has a record in the state folder: its process id, when that process started and
in which boot of the machine. A process is ended only if all three are those of the
record, so an id that was given to somebody else since then is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_S = 0.2
PROGRESS_S = 15.0
GRACE_S = 30.0
CHILDREN_S = 3.0
KILL_WAIT_S = 10.0
LOG_TAIL_LINES = 25
ROLES = ("prefill", "decode", "single")
PROXY = "proxy"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TAIL_BYTES = 16384


class KitError(RuntimeError):
    """A server cannot be started, found or ended; the text says what to do."""


@dataclass(frozen=True)
class _Stat:
    state: str
    session: int
    started: int


@dataclass(frozen=True)
class Record:
    """A server that was started here.

    Attributes:
        name: what it is called; its record's file is named after it.
        pid: its process id, which is that of its group and session too.
        started: when it started, in clock ticks since the machine's boot.
        boot: which boot of the machine that was.
    """

    name: str
    pid: int
    started: int
    boot: str
    log: str
    command: list[str]

    def save(self, folder: Path) -> None:
        """Write the record, one whole file or none."""
        path = record_path(folder, self.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        partial.replace(path)

    def running(self) -> bool:
        """Whether that very process is there."""
        stat = _stat(self.pid) if self.boot == _boot_id() else None
        return stat is not None and stat.started == self.started and stat.state != "Z"

    def members(self) -> list[int]:
        """The live processes of its session, as long as that session is its own."""
        if self.boot != _boot_id():
            return []
        leader = _stat(self.pid)
        if leader is not None and leader.started != self.started:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            stat = _stat(int(entry.name))
            # Nobody in its session can be older than the one who opened it.
            if (
                stat is not None
                and stat.session == self.pid
                and stat.started >= self.started
                and stat.state not in "ZX"
            ):
                found.append(int(entry.name))
        return found


def record_path(folder: Path, name: str) -> Path:
    """Where the record of a server is."""
    return folder / f"{name}.pid"


def records(folder: Path) -> list[Record]:
    """All servers that have a record.

    Raises:
        KitError: a file there is no record.
    """
    return [_load(path) for path in sorted(folder.glob("*.pid"))]


def start(name: str, command: Sequence[str], log: Path, folder: Path) -> Record:
    """Start a server in a session of its own; returns at once.

    The log of the start before is kept as ``FILE.old``.

    Raises:
        KitError: one of that name runs, or the program cannot be run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(folder, name)
    if path.exists():
        known = _load(path)
        if known.members():
            raise KitError(
                f"{name} runs already (pid {known.pid}, log {known.log}); end it with "
                f"cleanup.sh {kind(name)} first"
            )
        path.unlink()
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.is_file():
        # Whoever starts a server again often wants to know why it had ended.
        log.replace(log.with_name(f"{log.name}.old"))
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise KitError(f"{name}: cannot run {command[0]!r}: {error}") from error
    stat = _stat(process.pid)
    assert stat is not None, "a child that nobody has waited for has an entry"
    record = Record(
        name, process.pid, stat.started, _boot_id(), str(log), list(command)
    )
    record.save(folder)
    return record


def wait_healthy(
    record: Record, url: str, timeout: float, signals: Sequence[int] = ()
) -> None:
    """Wait until a GET of ``url`` answers 200; says now and then that it waits.

    Raises:
        KitError: the server ended, or ``timeout`` seconds passed.
        SystemExit: there is something in ``signals``.
    """
    began = said = time.monotonic()
    while not _answers(url):
        now = time.monotonic()
        if signals:
            raise SystemExit(128 + signals[0])
        if not record.running():
            raise KitError(
                f"{record.name} ended before it answered at {url}. Its log is "
                f"{record.log}, which ends:\n{_tail(Path(record.log))}"
            )
        if now - began > timeout:
            raise KitError(
                f"{record.name} did not answer at {url} within {timeout:.0f} s; raise "
                f"START_TIMEOUT if it is still loading. Its log is {record.log}, which "
                f"ends:\n{_tail(Path(record.log))}"
            )
        if now - said > PROGRESS_S:
            said = now
            print(f"{record.name}: starting for {now - began:.0f} s", flush=True)
        time.sleep(POLL_S)


def request_stop(record: Record) -> None:
    """Ask a server to end, without waiting for it."""
    if record.running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)


def stop(record: Record, folder: Path, grace: float = GRACE_S) -> None:
    """End a server and what it started, if anything of it is there.

    What is left ``grace`` seconds after the request is killed.

    Raises:
        KitError: something outlived being killed.
    """
    request_stop(record)
    deadline = time.monotonic() + grace
    while record.running() and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)
    if not record.running():
        # Its children end by themselves once it has gone, or not at all.
        _wait_gone(record, min(grace, CHILDREN_S))
    for member in record.members():
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    if not _wait_gone(record, KILL_WAIT_S):
        raise KitError(
            f"{record.name}: processes {record.members()} outlived SIGKILL for "
            f"{KILL_WAIT_S:.0f} s"
        )
    record_path(folder, record.name).unlink(missing_ok=True)


def kind(name: str) -> str:
    """What ``cleanup.sh`` calls servers of this name."""
    return PROXY if name.split("-")[0] == PROXY else "server"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_args(argv)
    folder: Path = options.state_dir.resolve()
    try:
        if options.what == "start":
            return _start(options, folder)
        if options.what == "list":
            for record in records(folder):
                state = "runs" if record.members() else "is gone"
                print(f"{record.name} {state}: pid {record.pid}, log {record.log}")
            return 0
        return _stop(options, folder)
    except KitError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("start", "stop", "list"):
        command = commands.add_parser(name)
        command.add_argument("--state-dir", type=Path, required=True)
        if name == "start":
            command.add_argument("--name", required=True)
            command.add_argument("--log", type=Path, required=True)
            command.add_argument("--health", metavar="URL", required=True)
            command.add_argument("--timeout", type=float, default=1800.0)
            command.add_argument("command", nargs="+", help="after --")
        elif name == "stop":
            which = command.add_mutually_exclusive_group(required=True)
            which.add_argument("--name", action="append")
            which.add_argument("--kind", choices=(PROXY, "server"))
            command.add_argument("--grace", type=float, default=GRACE_S)
    return parser


def _start(options: argparse.Namespace, folder: Path) -> int:
    if _answers(options.health):
        raise KitError(
            f"{options.name}: somebody answers at {options.health} already; it is left "
            "alone. End it, or choose another port"
        )
    # Noted and not raised: between a server's start and its record nobody could tell
    # what is to be ended.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda noted, _: signals.append(noted))
    record = start(options.name, options.command, options.log.resolve(), folder)
    _say(f"{record.name}: pid {record.pid}, log {record.log}")
    began = time.monotonic()
    try:
        wait_healthy(record, options.health, options.timeout, signals)
    except (KitError, SystemExit):
        # A server that nobody waits for would go unnoticed.
        stop(record, folder)
        raise
    _say(f"{record.name}: ready after {time.monotonic() - began:.0f} s")
    return 0


def _say(text: str) -> None:
    """Print a line in one piece, for others are started beside and print too."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _stop(options: argparse.Namespace, folder: Path) -> int:
    wanted = [
        record
        for record in records(folder)
        if (
            record.name in options.name
            if options.name
            else kind(record.name) == options.kind
        )
    ]
    if not wanted:
        print(f"nothing to end: no such server was started with state in {folder}")
    there = {record.name: bool(record.members()) for record in wanted}
    for record in wanted:
        request_stop(record)
    failures = []
    for record in wanted:
        try:
            stop(record, folder, options.grace)
        except KitError as error:
            failures.append(str(error))
            continue
        what = "ended" if there[record.name] else "was gone already"
        print(f"{record.name}: {what}", flush=True)
    if failures:
        raise KitError("\n".join(failures))
    return 0


def _load(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise KitError(
            f"{path} is no record of a server ({error}); remove it if nobody needs it"
        ) from error


def _wait_gone(record: Record, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while record.members():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S / 4)
    return True


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name in parentheses may hold blanks.
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[3]), int(fields[19]))


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _answers(url: str, timeout: float = 2.0) -> bool:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main())
