# SPDX-License-Identifier: Apache-2.0
"""The decode engine's process, and the measuring process's end of it.

Orders and answers are JSON, one a line.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from microbench_engine import Arena, BenchmarkError, Engine, Setting, set_up_process
from microbench_play import Play, Played, run

ANSWER_SECONDS = 120.0


class Peer:
    """Another process that runs one engine at a time.

    Args:
        arena_bytes: memory for its caches.
    """

    def __init__(self, arena_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(arena_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def open(self, setting: Setting) -> int:
        """Start an engine; returns its side channel's port."""
        self.tell("open", setting)
        return int(self.answer())

    def arrange(self, fragmented: bool) -> None:
        """See :meth:`Engine.arrange`."""
        self.tell("arrange", fragmented)
        self.answer()

    def play(self, play: Play) -> None:
        """Begin a measurement; :meth:`played` waits for its end."""
        self.tell("play", play)

    def played(self) -> Played:
        """What came of it."""
        return msgspec.convert(self.answer(), Played)

    def close_engine(self) -> None:
        """End the engine."""
        self.tell("close", None)
        self.answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, order: str, value: Any) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps([order, msgspec.to_builtins(value)]) + "\n"
        )
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to the oldest open order.

        Raises:
            BenchmarkError: the peer has failed, or does not answer.
        """
        watchdog = threading.Timer(ANSWER_SECONDS, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise BenchmarkError(
                f"the decode engine's process gave no answer within "
                f"{ANSWER_SECONDS:g} s, or has ended; its last words are above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"the decode engine failed: {answer['error']}")
        return answer["value"]


def main(arena_bytes: int) -> None:
    """Obey orders until there are no more."""
    # NIXL prints to the standard output, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    set_up_process()
    arena = Arena(arena_bytes)
    engine: Engine | None = None
    for line in sys.stdin:
        order, value = json.loads(line)
        answer: dict[str, Any] = {"value": None}
        try:
            if order == "open":
                engine = Engine("decode", msgspec.convert(value, Setting), arena)
                answer["value"] = engine.port
            elif order == "arrange":
                assert engine is not None, "no engine is open"
                engine.arrange(value)
            elif order == "play":
                assert engine is not None, "no engine is open"
                played = run(engine, msgspec.convert(value, Play))
                answer["value"] = msgspec.to_builtins(played)
            elif engine is not None:
                engine.close()
                engine = None
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
