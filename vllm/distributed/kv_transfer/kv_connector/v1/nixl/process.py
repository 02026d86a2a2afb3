# SPDX-License-Identifier: Apache-2.0
"""Whether a process on this host still exists, and whether its memory can be reached.

A same-host writer copies with its own process (CMA), and its TCP connections end
with it: a process that is gone can write no more.
"""

import ctypes
import errno
import os
from pathlib import Path

from .wire.ranks import ProcessInfo

_STATE, _THREADS, _START = 0, 17, 19
"""Places in :func:`_stat`: state, number of threads, start in ticks since boot."""


_MAX_PID = 1 << 22


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


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


def why_not_copied(local: ProcessInfo, remote: ProcessInfo, address: int) -> str | None:
    """Why the kernel does not let this process copy to or from one on its host.

    Args:
        local: this process.
        remote: the other one.
        address: of a byte that the other one can read.

    Returns:
        None if it does, or if the other one is on another host or cannot be told.
    """
    boot, _, namespace = local.boot_id.partition("/")
    other_boot, _, other_namespace = remote.boot_id.partition("/")
    if not boot or boot != other_boot:
        return None
    if namespace != other_namespace:
        return "they are in different PID namespaces"
    if not 0 < remote.pid < _MAX_PID or not 0 < address < 1 << 63:
        return None
    if _copy_error(remote.pid, address) in (errno.EPERM, errno.ENOSYS):
        return "the kernel denies it: ptrace permission is missing (SYS_PTRACE)"
    return None


def _copy_error(pid: int, address: int) -> int:
    """The error of copying a byte from another process; 0 if there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    here = _Vector(ctypes.cast(byte, ctypes.c_void_p), 1)
    there = _Vector(address, 1)
    got = libc.process_vm_readv(
        pid, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0)
    )
    return 0 if got == 1 else ctypes.get_errno()
