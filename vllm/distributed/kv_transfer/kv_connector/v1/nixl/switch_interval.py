# SPDX-License-Identifier: Apache-2.0
"""How long a thread that computes in Python may keep others from the interpreter.

The interpreter's switch interval, 5 ms unless somebody sets it, is what a thread
waits before the running one must let go, at every call that had let go itself. The
interval is one for the whole process, so it is lowered for as long as a hand-off
needs the interpreter at once, and put back.
"""

import sys
import threading

EAGER_SECONDS = 0.00005
"""The interval while a hand-off is worked on."""


class _Process:
    """The interval of this process, which any number of holders have lowered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._found = 0.0
        self._left = 0.0

    def lower(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._found = sys.getswitchinterval()
                if self._found > EAGER_SECONDS:
                    sys.setswitchinterval(EAGER_SECONDS)
                self._left = sys.getswitchinterval()
            self._holders += 1

    def restore(self) -> None:
        with self._lock:
            self._holders -= 1
            # What somebody else has set meanwhile stays.
            if self._holders == 0 and sys.getswitchinterval() == self._left:
                sys.setswitchinterval(self._found)


_process = _Process()


class SwitchInterval:
    """One holder of a low interval; any thread may call it, any number of times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._low = False

    @property
    def low(self) -> bool:
        """Whether this holder keeps the interval low."""
        return self._low

    def lower(self) -> None:
        """Keep the process's interval low until :meth:`restore`."""
        with self._lock:
            if not self._low:
                self._low = True
                _process.lower()

    def restore(self) -> None:
        """Need it no more; the last holder puts back what the first one found."""
        with self._lock:
            if self._low:
                self._low = False
                _process.restore()
