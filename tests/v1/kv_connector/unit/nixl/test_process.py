# SPDX-License-Identifier: Apache-2.0
"""Whether a process is gone is proven, never guessed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.process import (
    is_gone,
    this_process,
    why_not_copied,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import ProcessInfo

PATIENCE_S = 20.0

# Tells who it is, then waits. The name is cut in the middle of a character, and
# has a parenthesis.
CHILD = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None)
byte = ctypes.c_char()
{rename}
ticks = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()[19]
print(ticks.decode(), ctypes.addressof(byte), flush=True)
{then}
"""
RENAME = (
    'libc.prctl(15, ") Z \\u00e9\\u00e9\\u00e9\\u00e9\\u00e9\\u00e9".encode(), 0, 0, 0)'
)
LEADER_ENDS = """
threading.Thread(target=time.sleep, args=(600,)).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


class Child:
    def __init__(self, rename: str, then: str, within: tuple[str, ...]) -> None:
        code = CHILD.format(rename=rename, then=then)
        self.process = subprocess.Popen(
            [*within, sys.executable, "-S", "-c", code],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ticks, self.address = map(int, self.process.stdout.readline().split())
        self.info = ProcessInfo(this_process().boot_id, self.process.pid, ticks)

    def state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(
        rename: str = "",
        then: str = "time.sleep(600)",
        within: tuple[str, ...] = (),
    ) -> Child:
        made.append(Child(rename, then, within))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait(PATIENCE_S)
        if one.process.stdout is not None:
            one.process.stdout.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not so within the time allowed"
        time.sleep(0.01)


def test_this_process_is_there() -> None:
    me = this_process()
    assert me.boot_id
    assert me.pid == os.getpid()
    assert me.start_ticks > 0
    assert not is_gone(me, me)


def test_a_process_is_there_until_it_has_ended(child: Callable[..., Child]) -> None:
    one = child()
    assert not is_gone(this_process(), one.info)
    one.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: one.state() == "T")
    assert not is_gone(this_process(), one.info)
    one.process.kill()
    # Nobody has waited for it: it is a zombie, which does nothing any more.
    wait_for(lambda: is_gone(this_process(), one.info))
    assert one.state() == "Z"
    one.process.wait(PATIENCE_S)
    assert is_gone(this_process(), one.info)


def test_a_name_of_any_bytes_confuses_nobody(child: Callable[..., Child]) -> None:
    one = child(rename=RENAME)
    with open(f"/proc/{one.process.pid}/comm", "rb") as comm:
        name = comm.read()
    assert name.startswith(b") Z ")
    with pytest.raises(UnicodeDecodeError):
        name.decode()
    assert not is_gone(this_process(), one.info)


def test_a_process_lives_as_long_as_any_of_its_threads(
    child: Callable[..., Child],
) -> None:
    one = child(then=LEADER_ENDS)
    wait_for(lambda: one.state() == "Z")
    assert not is_gone(this_process(), one.info)
    one.process.kill()
    wait_for(lambda: is_gone(this_process(), one.info))


def test_another_process_under_the_same_pid_is_another(
    child: Callable[..., Child],
) -> None:
    one = child()
    earlier = msgspec.structs.replace(one.info, start_ticks=one.info.start_ticks - 1)
    assert is_gone(this_process(), earlier)


@pytest.mark.parametrize("pid", [0, -1, -(2**63), 2**63 - 1, 2**31])
def test_a_pid_that_cannot_be_proves_nothing(pid: int) -> None:
    me = this_process()
    assert not is_gone(me, ProcessInfo(me.boot_id, pid, 1))


def test_of_another_host_boot_or_namespace_nothing_is_known(
    child: Callable[..., Child],
) -> None:
    one = child()
    one.process.kill()
    one.process.wait(PATIENCE_S)
    assert is_gone(this_process(), one.info)
    for boot_id in ("", "elsewhere", one.info.boot_id + "x"):
        remote = msgspec.structs.replace(one.info, boot_id=boot_id)
        assert not is_gone(this_process(), remote)
    nowhere = msgspec.structs.replace(this_process(), boot_id="")
    assert not is_gone(nowhere, msgspec.structs.replace(one.info, boot_id=""))


def test_the_memory_of_a_child_can_be_reached(child: Callable[..., Child]) -> None:
    one = child()
    assert why_not_copied(this_process(), one.info, one.address) is None
    # It is asked, and not there: that is no matter of permission.
    assert why_not_copied(this_process(), one.info, 1) is None
    one.process.kill()
    one.process.wait(PATIENCE_S)
    assert why_not_copied(this_process(), one.info, one.address) is None


ASK = """
import sys
import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import process
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import ProcessInfo
remote = ProcessInfo(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(process.why_not_copied(process.this_process(), remote, int(sys.argv[4])))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_what_lacks_ptrace_permission_is_told(child: Callable[..., Child]) -> None:
    one = child()
    info = one.info
    asked = [info.boot_id, str(info.pid), str(info.start_ticks), str(one.address)]
    # Another user may not reach the memory of root's child.
    done = subprocess.run(
        [
            *("setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all"),
            *(sys.executable, "-c", ASK, *asked),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "HOME": "/tmp", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert "ptrace permission is missing" in done.stdout


def test_another_pid_namespace_is_told() -> None:
    me = this_process()
    boot = me.boot_id.partition("/")[0]
    contained = msgspec.structs.replace(me, boot_id=f"{boot}/pid:[1]")
    assert "PID namespaces" in (why_not_copied(me, contained, 1) or "")
    elsewhere = msgspec.structs.replace(me, boot_id="other/pid:[1]")
    assert why_not_copied(me, elsewhere, 1) is None


@pytest.mark.parametrize(
    ("pid", "address"), [(0, 1), (-1, 1), (2**31, 1), (1, 0), (1, -1), (1, 2**64)]
)
def test_what_cannot_be_is_not_asked(pid: int, address: int) -> None:
    me = this_process()
    remote = ProcessInfo(me.boot_id, pid, 1)
    assert why_not_copied(me, remote, address) is None
