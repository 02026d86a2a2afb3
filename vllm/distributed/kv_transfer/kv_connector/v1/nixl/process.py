# SPDX-License-Identifier: Apache-2.0
"""Whether a process on this host still exists.

A same-host writer copies with its own process (CMA), and its TCP connections end
with it: a process that is gone can write no more.
"""

import os
from pathlib import Path

from .wire import ProcessInfo


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and parentheses; fields count after it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def this_process() -> ProcessInfo:
    """Identify the calling process, its boot and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ProcessInfo(boot_id="", pid=os.getpid(), start_ticks=0)
    return ProcessInfo(
        boot_id=f"{boot}/{namespace}",
        pid=os.getpid(),
        start_ticks=_start_ticks(os.getpid()) or 0,
    )


def is_gone(local: ProcessInfo, remote: ProcessInfo) -> bool:
    """Proof that ``remote`` has ended; False also means "cannot tell"."""
    if not local.boot_id or local.boot_id != remote.boot_id:
        return False
    return _start_ticks(remote.pid) != remote.start_ticks
