# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own, which a test stops and kills.

As a program it prints one JSON object, then obeys one JSON list a line.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from v1.kv_connector.unit.nixl.arena import Rank, keep, offer, request
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import Address

START_SECONDS = 60.0


class PeerProcess:
    """The test's end of it; it takes seconds to start, :meth:`wait` is for that."""

    def __init__(self, mode: Mode, engine_id: str) -> None:
        root = Path(__file__).parents[4]
        path = os.pathsep.join([str(root), str(root.parent)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, mode.value, engine_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.address: Address = ("", 0)

    def wait(self) -> None:
        """Wait until it can be spoken to."""
        watchdog = threading.Timer(START_SECONDS, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.address = ("127.0.0.1", json.loads(line)["port"])
                watchdog.cancel()
                return
        raise AssertionError(f"the peer process did not start in {START_SECONDS} s")

    def close(self) -> None:
        """End it for good."""
        with self._process as process:
            process.kill()

    def tell(self, order: str, *values: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, *values]) + "\n")
        self._process.stdin.flush()

    def expect(self, transfer_id: TransferId) -> None:
        """A prefill request arrives there."""
        self.tell("expect", transfer_id)

    def offer(self, transfer_id: TransferId, blocks: list[int]) -> None:
        """Its KV is computed: every byte is its block's number."""
        self.tell("offer", transfer_id, blocks)

    def receive(self, transfer_id: TransferId, blocks: list[int], port: int) -> None:
        """A decode request is allocated blocks there."""
        self.tell("receive", transfer_id, blocks, port)

    def keep(self, name: TransferId, blocks: list[int]) -> None:
        """KV with the same content is kept there."""
        self.tell("keep", name, blocks)

    def kill(self) -> None:
        """End it; it stays a zombie."""
        self._process.kill()

    def stop(self) -> None:
        """Stop it, for :meth:`resume` to let it go on."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)


def _orders() -> "queue.SimpleQueue[list[object]]":
    orders: queue.SimpleQueue[list[object]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def _obey(rank: Rank, order: list[object]) -> None:
    transfer_id = TransferId(str(order[1]))
    if order[0] == "expect":
        rank.step(Expect(transfer_id, 1, ()))
        return
    blocks = np.array(order[2], dtype=np.int32)
    if order[0] == "offer":
        rank.pages[:, blocks] = blocks[None, :, None]
        rank.step(offer(transfer_id, blocks))
    elif order[0] == "keep":
        rank.pages[:, blocks] = blocks[None, :, None]
        rank.step(keep(transfer_id, blocks))
    else:
        address = ("127.0.0.1", int(str(order[3])))
        rank.step(Receive(request(transfer_id, blocks, rank.mode), address))


def main(mode: str, engine_id: str) -> None:
    """Run a rank until it is killed."""
    orders = _orders()
    rank = Rank(engine_id, Mode(mode))
    print(json.dumps({"port": rank.address[1]}), flush=True)
    while True:
        rank.step()
        while not orders.empty():
            _obey(rank, orders.get())
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
