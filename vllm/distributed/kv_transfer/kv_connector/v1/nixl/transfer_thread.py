# SPDX-License-Identifier: Apache-2.0
"""The thread that repeats a rank's transfer loop.

Commands wake it. NIXL offers nothing to wait on, so it looks for notifications at
a pace that follows what may arrive.
"""

import queue
import threading
from collections.abc import Callable, Iterable

from vllm.logger import init_logger

from .orders import Facts, Order, Pace
from .transfer_loop import TransferLoop

logger = init_logger(__name__)

SPIN_SECONDS = 0.00002
"""Wait between steps while something moves."""

SOON_SECONDS = (0.0001, 0.001)
"""Shortest and longest wait while an answer is awaited; it grows in silence."""

RELAXED_SECONDS = 0.04
"""Wait while only a first contact can come."""

_CLOSE_TIMEOUT = 5.0


class _Outbox:
    """Facts on their way to the forward thread; what is outdated is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: Facts | None = None

    def put(self, facts: Facts) -> None:
        """Add what one step brought."""
        with self._lock:
            earlier = () if self._facts is None else self._facts.events
            self._facts = Facts(earlier + facts.events, facts.tables)

    def take(self) -> Facts | None:
        """All since the last call, if there is anything."""
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
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._failures: list[Exception] = []
        self._loop: TransferLoop | None = None
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

    def submit(self, orders: Iterable[Order]) -> None:
        """Queue orders; never waits."""
        for order in orders:
            self._orders.put(order)

    def drain(self) -> Facts | None:
        """Take what was published since the last call, if anything; never waits."""
        return self._outbox.take()

    def close(self) -> None:
        """End the thread; peers are told first."""
        self._stop.set()
        self._orders.put(None)
        self._thread.join(_CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("The transfer thread did not end in %g s", _CLOSE_TIMEOUT)

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
        self._repeat(self._loop)
        try:
            self._loop.close()
        except Exception:
            logger.exception("The transfer thread did not close cleanly")

    def _repeat(self, loop: TransferLoop) -> None:
        patience = SOON_SECONDS[0]
        wait = RELAXED_SECONDS
        while not self._stop.is_set():
            orders = self._take(wait)
            try:
                pace = loop.step(orders)
            except Exception:
                # A defect must not silence the rank, or its peers' requests would
                # hang; what it was working on ends by its own deadlines.
                logger.exception("A step of the transfer thread failed")
                wait = 1.0
                continue
            if pace is Pace.SOON:
                wait = patience
                patience = min(patience * 1.2, SOON_SECONDS[1])
            else:
                patience = SOON_SECONDS[0]
                wait = SPIN_SECONDS if pace is Pace.NOW else RELAXED_SECONDS

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
