# SPDX-License-Identifier: Apache-2.0
"""The transfer loop on the forward thread: a mode for measuring, not for serving.

It tells how much of a hand-off's time the transfer thread saves. The loop advances
only in the engine's steps, so an idle engine answers no peer: the side that offers
KV for others to read needs its thread.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from vllm.logger import init_logger

from .orders import Facts, Order
from .transfer_loop import TransferLoop
from .transfer_thread import TransferThread

logger = init_logger(__name__)

MakeLoop = Callable[[Callable[[Facts], None]], TransferLoop]


class Transfers(Protocol):
    """What the forward thread needs of whatever runs its transfer loop."""

    @property
    def loop(self) -> TransferLoop:
        """The loop; other threads may only take its stats."""
        ...

    def submit(self, orders: Iterable[Order], at_once: bool = True) -> None:
        """Pass orders on; see :meth:`TransferThread.submit`."""
        ...

    def computing(self, computes: bool) -> None:
        """The forward thread begins to compute, or has ended."""
        ...

    def drain(self, wait: float = 0.0) -> Facts | None:
        """Take what was published since the last call, in ``wait`` seconds at most."""
        ...

    def new_stall(self) -> float:
        """Seconds of being stuck that no earlier call has told; one caller only."""
        ...

    def close(self, patience: float = 0.0) -> None:
        """End the loop; peers are told first, see :meth:`.TransferLoop.close`."""
        ...


class InlineTransfer:
    """Steps a :class:`TransferLoop` in the calls of the forward thread.

    Args:
        make_loop: builds the loop, given where to put its facts.

    Raises:
        Exception: what ``make_loop`` raised.
    """

    def __init__(self, make_loop: MakeLoop) -> None:
        self._facts: Facts | None = None
        self._loop = make_loop(self._publish)

    @property
    def loop(self) -> TransferLoop:
        """The loop."""
        return self._loop

    def submit(self, orders: Iterable[Order], at_once: bool = True) -> None:
        """Act on orders now; takes as long as what they start."""
        self._step(orders)

    def computing(self, computes: bool) -> None:
        """Nothing runs beside the forward thread."""

    def drain(self, wait: float = 0.0) -> Facts | None:
        """Advance the loop and take what was published since; never waits."""
        self._step(())
        facts, self._facts = self._facts, None
        return facts

    def new_stall(self) -> float:
        """None: the forward thread is the one that would be stuck."""
        return 0.0

    def close(self, patience: float = 0.0) -> None:
        """End the loop; peers are told first, see :meth:`.TransferLoop.close`."""
        try:
            self._loop.close(patience)
        except Exception:
            logger.exception("The transfer loop did not close cleanly")

    def _publish(self, facts: Facts) -> None:
        self._facts = facts.after(self._facts)

    def _step(self, orders: Iterable[Order]) -> None:
        try:
            self._loop.step(orders)
        except Exception:
            # What it was working on ends by its own deadlines; the engine goes on.
            logger.exception("A step of the transfer loop failed")


def start_transfers(on_thread: bool, make_loop: MakeLoop) -> Transfers:
    """Run a transfer loop on a thread of its own, or on the caller's."""
    return TransferThread(make_loop) if on_thread else InlineTransfer(make_loop)
