# SPDX-License-Identifier: Apache-2.0
"""The router as a process: start, drain on a signal, exit."""

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

import uvicorn

from .app import build_app
from .arguments import parse_args, parse_multiturn_args
from .config import ConfigError, Mode, RouterConfig
from .router import Router

logger = logging.getLogger("pd_router")

# For connections to close once their requests have ended.
_CLOSE_SECONDS = 5
_EXIT_USAGE = 2
_EXIT_NOT_STARTED = 3


class DrainingServer(uvicorn.Server):
    """Lets running requests end before it stops listening.

    Until then new requests are answered 503, so that a load balancer in front
    sees a router that is leaving instead of refused connections.
    """

    def __init__(self, config: uvicorn.Config, router: Router) -> None:
        super().__init__(config)
        self._router = router
        self._drain: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGTERM and SIGINT; stop at once on the second one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.drain)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def drain(self) -> None:
        """Begin to leave, or leave at once if that has begun."""
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._leave())
        else:
            self._hurry.set()

    async def _leave(self) -> None:
        in_flight = self._router.in_flight
        in_flight.draining = True
        limit = self._router.config.timeouts.drain
        logger.info("draining %d request(s), at most %g s", in_flight.count, limit)
        waits = [
            asyncio.create_task(in_flight.wait_idle()),
            asyncio.create_task(self._hurry.wait()),
        ]
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if in_flight.count:
            logger.warning("ending %d request(s) unfinished", in_flight.count)
        in_flight.stopping.set()
        self.should_exit = True


def build_server(config: RouterConfig) -> DrainingServer:
    """A server for one router; the caller runs it.

    Raises:
        ConfigError: the token file holds no token.
    """
    router = Router(config)
    return DrainingServer(
        uvicorn.Config(
            build_app(router),
            host=config.host,
            port=config.port,
            log_level=config.log_level,
            access_log=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        ),
        router,
    )


def main(mode: Mode, argv: Sequence[str] | None = None) -> int:
    """Run a router until it is told to stop; returns the exit status."""
    return _run(parse_args(mode, argv))


def main_multiturn(argv: Sequence[str] | None = None) -> int:
    """The same for a router that continues conversations, in the mode it is given."""
    return _run(parse_multiturn_args(argv))


def _run(config: RouterConfig) -> int:
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        server = build_server(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    logger.info(
        "%s router on http://%s:%d, %d worker(s)",
        config.mode,
        config.host,
        config.port,
        len(config.workers),
    )
    server.run()
    return 0 if server.started else _EXIT_NOT_STARTED
