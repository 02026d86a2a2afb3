# SPDX-License-Identifier: Apache-2.0
"""One leg: a request to an engine, read whole or event by event."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

import aiohttp

from .config import Timeouts
from .errors import Reply
from .sse import (
    Event,
    EventTooLargeError,
    Framer,
    Kind,
    classify,
    may_need_reading,
    without_params,
)
from .workers import Worker

# Engines drop idle connections after 5 s by default; a POST on one that is just
# being dropped would fail without having been seen.
_KEEPALIVE_SECONDS = 2.0
# How long the end of the stream may take once its last event is there.
_TAIL_SECONDS = 1.0

_NOT_FORWARDED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "date",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-admin-key",
        "x-conversation-id",
        # A rank of one engine means nothing to the other.
        "x-data-parallel-rank",
        "x-request-id",
    }
)

DP_RANK_HEADER = "X-data-parallel-rank"
"""Which data-parallel rank behind its server an engine is to use."""


class Failure(Enum):
    """How a leg failed without an HTTP status."""

    CONNECT = auto()
    BROKEN = auto()
    TIMEOUT = auto()


class LegError(Exception):
    """The engine could not be asked, or its answer did not end."""

    def __init__(self, kind: Failure, worker: Worker, detail: str) -> None:
        super().__init__(f"{worker.role} engine: {detail}")
        self.kind = kind
        self.worker = worker


class StatusError(Exception):
    """The engine answered with an error status."""

    def __init__(self, worker: Worker, reply: Reply) -> None:
        super().__init__(f"{worker.role} engine answered {reply.status}")
        self.worker = worker
        self.reply = reply


class ErrorEventError(Exception):
    """The engine began a stream whose first event is an error."""

    def __init__(self, worker: Worker, event: Event) -> None:
        self.worker = worker
        self.error = event.value["error"]
        self.value = event.value
        super().__init__(f"{worker.role} engine: {self.message}")

    @property
    def message(self) -> str:
        """The engine's own words."""
        error = self.error
        text = error.get("message") if isinstance(error, dict) else error
        return str(text)

    @property
    def status(self) -> int | None:
        """The status code that the engine put into the event, if any."""
        code = self.error.get("code") if isinstance(self.error, dict) else None
        return code if isinstance(code, int) else None


class StreamFailedError(Exception):
    """The engine reported an error inside a running stream."""


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that mean the same on the other side of the router."""
    return {k: v for k, v in headers.items() if k.lower() not in _NOT_FORWARDED}


class EventStream:
    """An engine's stream, committed once its first real event is there.

    ``on_completed`` is called before the final event is given out.
    """

    def __init__(
        self, worker: Worker, response: aiohttp.ClientResponse, idle: float
    ) -> None:
        self.worker = worker
        self.status = response.status
        self.headers = forwarded(response.headers)
        self.content_type = response.headers["Content-Type"]
        self.completed = False
        self.on_completed: Callable[[], None] | None = None
        self._response = response
        self._idle = idle
        self._framer = Framer()
        self._held: list[tuple[bytes, Event]] = []

    async def commit(self) -> None:
        """Read and hold events until one shows that there is an answer.

        Raises:
            ErrorEventError: an error comes first.
            LegError: the stream ends before it has said anything.
        """
        decided = False
        while not decided:
            # The caller bounds this wait: an engine sends its headers at once and
            # its first event only after queueing and prefill.
            blocks, ended = await self._read(None)
            for block in blocks:
                event = classify(block)
                if event.kind is Kind.ERROR and not decided:
                    raise ErrorEventError(self.worker, event)
                decided |= event.kind in (Kind.CONTENT, Kind.DONE)
                self._held.append((without_params(block, event), event))
            if ended and not decided:
                raise self._cut_short("the stream ended before its first event")

    async def events(
        self,
    ) -> AsyncGenerator[list[tuple[bytes, Event | None]], None]:
        """Batches of events as they arrive, the held ones first.

        Events that need no look are not parsed. The bytes are the engine's own
        except where hand-off parameters had to go.

        Raises:
            StreamFailedError: after an error event, which is the last one given.
            LegError: the stream breaks off, stalls or ends unfinished.
        """
        held, self._held = self._held, []
        batch: list[tuple[bytes, Event | None]] = list(held)
        while True:
            failed = self._scan(batch)
            if batch:
                yield batch
            if failed:
                raise StreamFailedError("the engine reported an error")
            if self.completed:
                break
            blocks, ended = await self._read(self._idle)
            batch = [self._look(block) for block in blocks]
            if ended and not batch:
                raise self._cut_short("the stream ended without its final event")
        tail = await self._tail()
        if tail:
            yield [(tail, None)]

    def close(self) -> None:
        """End the leg; an unfinished one shows the engine a disconnect."""
        if self.completed and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    def _look(self, block: bytes) -> tuple[bytes, Event | None]:
        if not may_need_reading(block):
            return block, None
        event = classify(block)
        return without_params(block, event), event

    def _scan(self, batch: list[tuple[bytes, Event | None]]) -> bool:
        """Cut the batch after a final event; true if that is an error."""
        for position, (_, event) in enumerate(batch):
            kind = event.kind if event else Kind.CONTENT
            if kind is Kind.ERROR:
                del batch[position + 1 :]
                return True
            if kind is Kind.DONE and not self.completed:
                self.completed = True
                if self.on_completed:
                    self.on_completed()
        return False

    async def _read(self, limit: float | None) -> tuple[list[bytes], bool]:
        with translated(self.worker):
            async with asyncio.timeout(limit):
                data = await self._response.content.readany()
            if not data:
                return [], True
            try:
                return self._framer.feed(data), False
            except EventTooLargeError as error:
                raise LegError(Failure.BROKEN, self.worker, str(error)) from error

    async def _tail(self) -> bytes:
        rest = self._framer.rest()
        try:
            async with asyncio.timeout(_TAIL_SECONDS):
                while data := await self._response.content.readany():
                    rest += data
        except (TimeoutError, aiohttp.ClientError, OSError):
            # The answer is complete; how the connection ends changes nothing.
            pass
        return rest

    def _cut_short(self, detail: str) -> LegError:
        return LegError(Failure.BROKEN, self.worker, detail)


class Backend:
    """The HTTP client towards all engines."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the client; needs a running event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._timeouts.connect
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            # The router's own environment must not send engine traffic to a proxy.
            trust_env=False,
        )

    async def stop(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()

    async def post(
        self,
        worker: Worker,
        path: str,
        payload: bytes,
        headers: Mapping[str, str],
        limit: float,
    ) -> Reply:
        """Send a request and read the whole answer within ``limit`` seconds.

        Raises:
            StatusError: the status is not 200.
            LegError: no connection, no answer in time, or a broken one.
        """
        with translated(worker):
            async with (
                asyncio.timeout(limit),
                await self._send(worker, path, payload, headers) as response,
            ):
                return await _whole(worker, response)

    async def open(
        self,
        worker: Worker,
        path: str,
        payload: bytes,
        headers: Mapping[str, str],
        *,
        streaming: bool,
    ) -> Reply | EventStream:
        """Send a request and wait until its outcome shows.

        That is the first real event of a stream, or a whole answer.

        Raises:
            StatusError: the status is not 200.
            ErrorEventError: the stream begins with an error.
            LegError: no connection, no outcome in time, or a broken answer.
        """
        limit = self._timeouts.first_event
        if not streaming:
            limit += self._timeouts.idle
        response: aiohttp.ClientResponse | None = None
        try:
            with translated(worker):
                async with asyncio.timeout(limit):
                    response = await self._send(worker, path, payload, headers)
                    if response.status == 200 and _is_event_stream(response):
                        stream = EventStream(worker, response, self._timeouts.idle)
                        await stream.commit()
                        return stream
                    return await _whole(worker, response)
        except BaseException:
            if response is not None:
                response.close()
            raise

    async def get(
        self,
        worker: Worker,
        path: str,
        limit: float,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Fetch ``path`` within ``limit`` seconds, whatever its status.

        Raises:
            LegError: no connection, no answer in time, or a broken one.
        """
        with translated(worker):
            async with (
                asyncio.timeout(limit),
                self._open_session.get(
                    worker.address.url + path,
                    headers={**(headers or {}), "Accept-Encoding": "identity"},
                ) as response,
            ):
                return await _reply(response)

    async def _send(
        self, worker: Worker, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        rank = worker.address.dp_rank
        return await self._open_session.post(
            worker.address.url + path,
            data=payload,
            headers={
                **headers,
                **({} if rank is None else {DP_RANK_HEADER: str(rank)}),
                "Content-Type": "application/json",
                # Bytes are passed on as they come and read on the way.
                "Accept-Encoding": "identity",
            },
            allow_redirects=False,
        )

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Backend.start() has not been called")
        return self._session


@contextmanager
def translated(worker: Worker) -> Iterator[None]:
    """Turn the client library's failures into ``LegError``."""
    try:
        yield
    except (
        aiohttp.ClientConnectorError,
        aiohttp.ConnectionTimeoutError,
    ) as error:
        raise LegError(Failure.CONNECT, worker, "cannot be reached") from error
    except TimeoutError as error:
        raise LegError(Failure.TIMEOUT, worker, "did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegError(
            Failure.BROKEN, worker, "the connection broke off before the end"
        ) from error


async def _whole(worker: Worker, response: aiohttp.ClientResponse) -> Reply:
    reply = await _reply(response)
    if reply.status != 200:
        raise StatusError(worker, reply)
    return reply


async def _reply(response: aiohttp.ClientResponse) -> Reply:
    body = await response.read()
    return Reply(
        status=response.status,
        body=body,
        headers=forwarded(response.headers),
        content_type=response.headers.get("Content-Type", "application/json"),
    )


def _is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"
