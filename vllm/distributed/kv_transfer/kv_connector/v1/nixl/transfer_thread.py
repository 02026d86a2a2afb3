# SPDX-License-Identifier: Apache-2.0
"""The thread that repeats a rank's transfer loop.

Commands wake it. NIXL offers nothing to wait on, so it looks for notifications at
a pace that follows what may arrive.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable

from vllm.logger import init_logger

from .orders import Facts, Order, Pace
from .rhythm import Rhythm
from .switch_interval import SwitchInterval
from .transfer_loop import TransferLoop

logger = init_logger(__name__)

DEFECT_SECONDS = 1.0
"""Pause after a step that has failed."""

STALL_SECONDS = 2.0
"""A step may take so long; no wait between two of them is longer."""

STALL_LOG_SECONDS = 5.0

_CLOSE_TIMEOUT = 5.0
"""Bound on the end of the thread, beyond what it may wait for peers."""


class _Outbox:
    """Facts on their way to the forward thread; what is outdated is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: Facts | None = None
        # An entry while there are events; a wait for it is cheaper than a Condition's.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, facts: Facts) -> None:
        """Add what one step brought."""
        with self._lock:
            rung = self._facts is not None and bool(self._facts.events)
            self._facts = facts.after(self._facts)
            if facts.events and not rung:
                self._bell.put(None)

    def take(self, wait: float) -> Facts | None:
        """All since the last call; waits so many seconds if there is no event."""
        with contextlib.suppress(queue.Empty):
            self._bell.get(block=wait > 0, timeout=wait)
        with self._lock:
            facts, self._facts = self._facts, None
            return facts


class TransferThread:
    """Runs a :class:`TransferLoop`; the forward thread only queues and drains.

    Args:
        make_loop: builds the loop, given where to put its facts; called on the new
            thread, which from then on alone uses NIXL.

    Raises:
        Exception: what ``make_loop`` raised.
    """

    def __init__(
        self, make_loop: Callable[[Callable[[Facts], None]], TransferLoop]
    ) -> None:
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._outbox = _Outbox()
        self._interval = SwitchInterval()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._failures: list[Exception] = []
        self._loop: TransferLoop | None = None
        self._computes = False
        self._steady = False
        self._turned_at = time.monotonic()
        self._stall_told = 0.0
        self._patience = 0.0
        self._thread = threading.Thread(
            target=self._run, args=(make_loop,), name="nixl-transfer", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failures:
            self._thread.join()
            raise self._failures[0]

    @property
    def loop(self) -> TransferLoop:
        """The loop; other threads may only take its stats."""
        assert self._loop is not None
        return self._loop

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Orders that the thread has not taken up yet."""
        return self._orders.qsize()

    def submit(self, orders: Iterable[Order], at_once: bool = True) -> None:
        """Queue orders; never waits.

        ``at_once``: they are worth keeping this thread from the interpreter.
        """
        for order in orders:
            self._orders.put(order)
        if at_once:
            # Before the woken thread asks for the interpreter, which this one holds.
            self._interval.lower()

    def computing(self, computes: bool) -> None:
        """The forward thread begins to compute, or has ended; never waits."""
        ends = self._computes and not computes
        self._computes = computes
        if ends and self._steady:
            # What has come meanwhile is answered before the next computation.
            self._orders.put(None)

    def drain(self, wait: float = 0.0) -> Facts | None:
        """Take what was published since the last call; waits if there is nothing."""
        return self._outbox.take(wait)

    def new_stall(self) -> float:
        """Seconds of being stuck that no earlier call has told; one caller only."""
        late = time.monotonic() - self._turned_at - STALL_SECONDS
        if late <= 0:
            self._stall_told = 0.0
            return 0.0
        # The thread may have turned since, and be stuck anew.
        told = min(self._stall_told, late)
        if told < STALL_LOG_SECONDS <= late:
            logger.error(
                "The transfer thread has not come back from a step for %.0f s; no KV "
                "moves and no peer is answered",
                late + STALL_SECONDS,
            )
        self._stall_told = late
        return late - told

    def close(self, patience: float = 0.0) -> None:
        """End the thread; peers are told first, see :meth:`.TransferLoop.close`."""
        self._patience = patience
        self._stop.set()
        self._orders.put(None)
        self._thread.join(patience + _CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.warning(
                "The transfer thread did not end in %g s", patience + _CLOSE_TIMEOUT
            )

    def _run(
        self, make_loop: Callable[[Callable[[Facts], None]], TransferLoop]
    ) -> None:
        try:
            self._loop = make_loop(self._outbox.put)
        except Exception as error:  # noqa: BLE001 - raised again by the creator
            self._failures.append(error)
            return
        finally:
            self._ready.set()
        try:
            self._repeat(self._loop)
        finally:
            self._interval.restore()
        try:
            # What was queued while the last step was under way.
            self._loop.step(self._take(0.0))
        except Exception:
            logger.exception("The last orders of the transfer thread failed")
        try:
            self._loop.close(self._patience)
        except Exception:
            logger.exception("The transfer thread did not close cleanly")

    def _repeat(self, loop: TransferLoop) -> None:
        rhythm = Rhythm(time.monotonic())
        wait = rhythm.wait
        while not self._stop.is_set():
            orders = self._take(wait)
            # A step lets go of the interpreter in each of its calls of NIXL.
            self._interval.lower()
            began = self._turned_at = time.monotonic()
            try:
                pace = loop.step(orders)
            except Exception:
                # A defect must not silence the rank, or its peers' requests would
                # hang; what it was working on ends by its own deadlines.
                logger.exception("A step of the transfer thread failed")
                self._interval.restore()
                wait = DEFECT_SECONDS
                continue
            self._steady = pace is Pace.STEADY
            rhythm.stepped(pace, bool(orders), self._computes, began, time.monotonic())
            wait = rhythm.wait
            self._set_interval(rhythm.eager)

    def _set_interval(self, eager: bool) -> None:
        if not eager:
            self._interval.restore()
        # An order may have come since; it lowered the interval after it was queued.
        if eager or not self._orders.empty():
            self._interval.lower()

    def _take(self, wait: float) -> list[Order]:
        orders: list[Order] = []
        try:
            order = self._orders.get(timeout=wait)
            while True:
                if order is not None:
                    orders.append(order)
                order = self._orders.get_nowait()
        except queue.Empty:
            return orders
