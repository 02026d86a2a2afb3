# SPDX-License-Identifier: Apache-2.0
"""Serving a list of prompts: a bounded number of calls at once, one answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .attempts import Call
from .dispatch import Dispatcher
from .errors import Cause, HandoffError, Reply
from .legs import EventStream
from .prompts import Merger
from .relay import ClientConnection, stream_of
from .sse import DONE_EVENT, Event, Kind, classify

# Events waiting for a client that reads slowly.
_QUEUE_LENGTH = 64


@dataclass(frozen=True, slots=True)
class _Item:
    """One event of one part."""

    part: int
    source: EventStream
    block: bytes
    event: Event


async def relay_many(
    dispatcher: Dispatcher,
    calls: Sequence[Call],
    merger: Merger,
    client: ClientConnection,
    concurrency: int,
) -> None:
    """Serve the parts of one request and merge their answers.

    The first part that fails ends the others and the request. A stream begins
    with the first event of any part: with more parts than ``concurrency``,
    waiting for all would mean holding whole answers.

    Raises:
        RouterError: a part failed.
        StreamFailedError: a part's engine reported an error in mid-stream, and
            the client has been shown it.
    """
    turns = asyncio.Semaphore(concurrency)
    if calls[0].streaming:
        await _stream(dispatcher, calls, merger, client, turns)
    else:
        await _whole(dispatcher, calls, merger, client, turns)


async def _whole(
    dispatcher: Dispatcher,
    calls: Sequence[Call],
    merger: Merger,
    client: ClientConnection,
    turns: asyncio.Semaphore,
) -> None:
    async def serve(call: Call) -> Reply:
        async with turns, dispatcher.open(call) as answer:
            if isinstance(answer.content, EventStream):
                raise _unexpected("a stream", answer.attempt.transfer_id)
            return answer.content

    async with _together([serve(call) for call in calls]) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        replies = [task.result() for task in tasks]
    try:
        merged = merger.whole([reply.json() for reply in replies])
    except (AttributeError, KeyError, TypeError) as error:
        raise _unexpected("a malformed answer", None) from error
    text = json.dumps(merged, ensure_ascii=False, separators=(",", ":"))
    first = replies[0]
    await client.reply(
        Reply(
            first.status,
            text.encode("utf-8", "surrogatepass"),
            first.headers,
            first.content_type,
        )
    )


async def _stream(
    dispatcher: Dispatcher,
    calls: Sequence[Call],
    merger: Merger,
    client: ClientConnection,
    turns: asyncio.Semaphore,
) -> None:
    queue: asyncio.Queue[_Item | Exception | None] = asyncio.Queue(_QUEUE_LENGTH)

    async def serve(part: int, call: Call) -> None:
        async with turns, dispatcher.open(call) as answer:
            content = answer.content
            if isinstance(content, Reply):
                raise _unexpected("a whole answer", answer.attempt.transfer_id)
            async with aclosing(stream_of(answer, content)) as batches:
                async for batch in batches:
                    for block, event in batch:
                        known = event or classify(block)
                        await queue.put(_Item(part, content, block, known))

    async def report(part: int, call: Call) -> None:
        try:
            await serve(part, call)
        # Whatever it is, the reader of the queue raises it.
        except Exception as error:  # noqa: BLE001
            await queue.put(error)
        else:
            await queue.put(None)

    async with _together([report(part, call) for part, call in enumerate(calls)]):
        running = len(calls)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
                continue
            if not client.started:
                source = item.source
                await client.start_stream(
                    source.status, source.content_type, source.headers
                )
            if item.event.kind is Kind.ERROR:
                await client.write(item.block)
            elif item.event.kind is Kind.CONTENT:
                data = _merged(merger, item)
                if data is not None:
                    await client.write(data)
    await client.write((merger.final_usage() or b"") + DONE_EVENT)
    await client.finish()


def _merged(merger: Merger, item: _Item) -> bytes | None:
    try:
        return merger.chunk(item.part, item.event)
    except (AttributeError, KeyError, TypeError) as error:
        raise _unexpected("a malformed event", None) from error


@asynccontextmanager
async def _together(
    work: Sequence[Coroutine[Any, Any, Any]],
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(part) for part in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unexpected(what: str, transfer_id: str | None) -> HandoffError:
    return HandoffError(
        Cause.DECODE_BROKEN,
        f"a decode engine sent {what} where the request asked for something else",
        transfer_id=transfer_id,
    )
