# SPDX-License-Identifier: Apache-2.0
"""A file with one line of JSON per finished hand-off and side.

Whoever hands a line over only queues it. A thread of its own formats and writes; a
disk that is slow or full costs lines, never time.
"""

import contextlib
import fcntl
import json
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from vllm.logger import init_logger

from .config import ConfigError

logger = init_logger(__name__)

QUEUED_LINES = 1024
FILE_BYTES = 64 << 20
"""Size at which the file becomes ``FILE.1``, in place of the one before."""
_CLOSE_SECONDS = 2.0


class TraceFile:
    """Appends to ``path``, which several engines may share.

    Args:
        path: the file; made if it does not exist.
        max_bytes: see :data:`FILE_BYTES`.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str, max_bytes: int = FILE_BYTES) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config['handoff_trace_file'] is {path!r}, which "
                f"cannot be opened for appending: {error.strerror}. Name a file in a "
                "folder that exists and that the engine may write to."
            ) from error
        self._lines: queue.Queue[Mapping[str, object] | None] = queue.Queue(
            QUEUED_LINES
        )
        self._dropped = 0
        self._failed = False
        self._thread = threading.Thread(
            target=self._run, name="nixl-handoff-trace", daemon=True
        )
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were lost because the file could not keep up or be written."""
        return self._dropped

    def put(self, line: Mapping[str, object]) -> None:
        """Queue a line, whose content must not change any more; never waits."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued, for two seconds at most."""
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError, TypeError) as error:
                self._dropped += 1
                if not self._failed:
                    self._failed = True
                    logger.warning(
                        "%s cannot be written, so hand-offs are missing in it: %s",
                        self._path,
                        error,
                    )
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        # Asked each time, since other engines write here too.
        size = os.fstat(self._file.fileno()).st_size
        if size and size + len(data) > self._max_bytes:
            self._turn_over()
        # One call, so that lines of several engines do not mix.
        self._file.write(data)

    def _turn_over(self) -> None:
        # Two engines may find the file full at the same moment. A file system
        # without locks risks the older half of the trace then, and no more.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            current = os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            current = False
        if current:
            # Otherwise another engine that writes here has done it.
            os.replace(self._path, f"{self._path}.1")
        reopened = self._open()
        self._file.close()
        self._file = reopened

    def _open(self) -> IO[bytes]:
        return open(self._path, "ab", buffering=0)
