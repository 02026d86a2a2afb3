# SPDX-License-Identifier: Apache-2.0
"""Whether a process on this host still exists.

A same-host writer copies with its own process (CMA), and its TCP connections end
with it: a process that is gone can write no more.
"""

import os
from pathlib import Path

from .wire import ProcessInfo

_STATE, _THREADS, _START = 0, 17, 19
"""Places in :func:`_stat`: state, number of threads, start in ticks since boot."""


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on.

    Raises:
        OSError: there is no such process, or it is hidden from this one.
    """
    # The command name may hold any bytes but NUL; fields count after it.
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return stat.rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def this_process() -> ProcessInfo:
    """Identify the calling process, its boot and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start_ticks = int(_stat(os.getpid())[_START])
    except OSError:
        return ProcessInfo(boot_id="", pid=os.getpid(), start_ticks=0)
    return ProcessInfo(f"{boot}/{namespace}", os.getpid(), start_ticks)


def is_gone(local: ProcessInfo, remote: ProcessInfo) -> bool:
    """Proof that ``remote`` has ended; False also means "cannot tell"."""
    if not local.boot_id or local.boot_id != remote.boot_id:
        return False
    if remote.pid <= 0:
        return False
    try:
        stat = _stat(remote.pid)
    except OSError:
        return not _exists(remote.pid)
    if int(stat[_START]) != remote.start_ticks:
        return True
    # The first thread of a dying process may have ended before the others.
    return stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1
