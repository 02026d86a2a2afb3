# SPDX-License-Identifier: Apache-2.0
"""From the legs' answers to the client's connection."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .attempts import Answer, Call
from .dispatch import Dispatcher
from .errors import Cause, HandoffError, Reply, RouterError
from .failures import decode_failure
from .legs import EventStream, LegError, StreamFailedError
from .metrics import Metrics
from .sse import Event, strip_params

logger = logging.getLogger("pd_router")

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientStalledError(Exception):
    """The client does not take what it is sent."""


class ClientConnection:
    """The client's side of one request: headers once, then bytes, then the end.

    Sending raises ``ClientStalledError`` if the client takes nothing for
    ``patience`` seconds.
    """

    def __init__(self, send: Send, request_id: str, patience: float) -> None:
        self._send = send
        self._request_id = request_id
        self._patience = patience
        self.started = False
        self.finished = False
        self.started_at: float | None = None
        self.status = 0

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        await self._start(
            reply.status,
            reply.content_type,
            {**reply.headers, "Content-Length": str(len(reply.body))},
        )
        await self._body(reply.body, more=False)

    async def start_stream(
        self, status: int, content_type: str, headers: Mapping[str, str]
    ) -> None:
        """Send the headers of a stream."""
        await self._start(status, content_type, {**_STREAM_HEADERS, **headers})
        self.started_at = time.monotonic()

    async def write(self, data: bytes) -> None:
        """Send bytes of a stream at once."""
        await self._body(data, more=True)

    async def finish(self) -> None:
        """End a stream."""
        await self._body(b"", more=False)

    async def fail(self, error: RouterError) -> None:
        """Tell about a failure in the way that is still open."""
        if self.finished:
            return
        if not self.started:
            await self.reply(error.reply())
            return
        await self.write(error.event())
        await self.finish()

    async def _start(
        self, status: int, content_type: str, headers: Mapping[str, str]
    ) -> None:
        self.started = True
        self.status = status
        raw = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in (
                *headers.items(),
                ("Content-Type", content_type),
                ("X-Request-Id", self._request_id),
            )
        ]
        await self._bounded(
            {"type": "http.response.start", "status": status, "headers": raw}
        )

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._bounded(
            {"type": "http.response.body", "body": data, "more_body": more}
        )
        self.finished = not more

    async def _bounded(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError as error:
            raise ClientStalledError(
                f"the client took nothing for {self._patience:g} s"
            ) from error


class InFlight:
    """The requests being served, for draining and for the final stop."""

    def __init__(self) -> None:
        self.draining = False
        self.stopping = asyncio.Event()
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """How many requests are being served."""
        return self._count

    def enter(self) -> None:
        """Count a request in."""
        self._count += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return once nothing is being served."""
        await self._idle.wait()


Serve = Callable[[ClientConnection], Coroutine[Any, Any, None]]


class RelayResponse(Response):
    """Serves a request for as long as its client and the router stay.

    Everything happens inside the response so that the headers can wait for the
    engines, and so that a client that leaves ends the work at any point.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        path: str,
        request_id: str,
        in_flight: InFlight,
        metrics: Metrics,
        patience: float,
    ) -> None:
        # Starlette's own constructor would render a body.
        self.background = None
        self.status_code = 200
        self._serve = serve
        self._path = path
        self._request_id = request_id
        self._in_flight = in_flight
        self._metrics = metrics
        self._patience = patience
        self._arrived = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request to its end."""
        client = ClientConnection(send, self._request_id, self._patience)
        self._in_flight.enter()
        work = asyncio.create_task(self._work(client))
        gone = asyncio.create_task(_disconnected(receive))
        stopping = asyncio.create_task(self._in_flight.stopping.wait())
        outcome = "internal_error"
        try:
            await asyncio.wait(
                {work, gone, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if client.finished and not work.done():
                # A client that has its whole answer may leave; what remains is
                # bounded, and cutting it off would look like a failure.
                await asyncio.wait(
                    {work, stopping}, return_when=asyncio.FIRST_COMPLETED
                )
            if work.done():
                outcome = work.result()
            else:
                await _cancel(work)
                outcome = "client_disconnect"
                if not gone.done():
                    outcome = "aborted"
                    await client.fail(
                        HandoffError(Cause.SHUTDOWN, "the router is shutting down")
                    )
        finally:
            for task in (work, gone, stopping):
                await _cancel(task)
            self._in_flight.leave()
            self._note(client, outcome)

    async def _work(self, client: ClientConnection) -> str:
        try:
            await self._serve(client)
        except RouterError as error:
            await client.fail(error)
            return error.outcome
        except ClientStalledError as error:
            logger.warning("request=%s ended: %s", self._request_id, error)
            return "client_stalled"
        except StreamFailedError:
            # The engine's own error event has been passed on already.
            await client.finish()
            return "stream_failed"
        return "ok"

    def _note(self, client: ClientConnection, outcome: str) -> None:
        self._metrics.request(self._path, outcome)
        ttft = client.started_at and client.started_at - self._arrived
        if ttft is not None:
            self._metrics.first_event(ttft)
        logger.info(
            "request=%s path=%s outcome=%s status=%d ttft=%s total=%.3fs",
            self._request_id,
            self._path,
            outcome,
            client.status,
            "-" if ttft is None else f"{ttft:.3f}s",
            time.monotonic() - self._arrived,
        )


async def relay_one(
    dispatcher: Dispatcher, call: Call, client: ClientConnection
) -> None:
    """Serve one call and pass its answer on byte for byte."""
    async with dispatcher.open(call) as answer:
        content = answer.content
        if isinstance(content, Reply):
            await client.reply(
                Reply(
                    content.status,
                    strip_params(content.body),
                    content.headers,
                    content.content_type,
                )
            )
            return
        await client.start_stream(content.status, content.content_type, content.headers)
        async with aclosing(stream_of(answer, content)) as batches:
            async for batch in batches:
                await client.write(b"".join(block for block, _ in batch))
        await client.finish()


async def stream_of(
    answer: Answer, content: EventStream
) -> AsyncGenerator[list[tuple[bytes, Event | None]], None]:
    """The events of an answer, with what breaks them off told as for clients.

    Raises:
        StreamFailedError: the engine's own error event was the last one.
        RouterError: the stream broke off.
    """
    try:
        async with aclosing(content.events()) as batches:
            async for batch in batches:
                yield batch
    except LegError as error:
        raise _in_mid_stream(error, answer) from error


def _in_mid_stream(error: LegError, answer: Answer) -> RouterError:
    answer.attempt.blame(error.worker)
    failure = decode_failure(error, answer.attempt.transfer_id)
    logger.warning("%s broke off in mid-stream: %s", answer.attempt, error)
    failure.outcome = "stream_failed"
    return failure


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
