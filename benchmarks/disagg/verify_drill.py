# SPDX-License-Identifier: Apache-2.0
"""Faults that clients and routers cause every day, and what they leave behind.

Connections are dropped without a word, as the kernel does for a client that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from bench_requests import Body
from verify_answers import Answer, Kind, compare
from verify_engines import Engines
from verify_http import AskError, greedy
from verify_legs import Legs, Way, new_transfer_id
from verify_prompts import Tokens
from verify_result import Report, Unchecked

STREAMED_TOKENS = 128
CUT_AFTER_EVENTS = 3
# Of the time that the prompt takes when nobody disturbs: well within its computation.
CUT_AT = 0.3
LEAST_S = 0.005
# The machine may be quicker than when that time was taken.
TRIES = 3
SOONER = 4

_REMEDY = (
    "The log of the engine named above has the cause; `tools/kv_integrity.py "
    "HOST:PORT` shows what is held, and docs/design/faults.md when it is let go "
    "of. Blocks that stay held are lost until that engine restarts."
)


class TooLate(Unchecked):
    """The request had its answer before it could be disturbed."""


@dataclass
class Drill:
    """Disturbs requests of one pair, and checks after each that all is well.

    Args:
        way: how the request that follows is sent.
        legs: the pair, whose legs are sent one by one.
        prompt: a long one, with the answer that it must have.
        usual_seconds: what it takes until it is computed.
        bound: seconds within which the engines must have got over each fault.
        say: is told what is done.
    """

    engines: Engines
    way: Way
    legs: Legs
    model: str
    prompt: Tokens
    expected: Answer
    usual_seconds: float
    margin: float
    bound: float
    run: str
    say: Callable[[str], None]
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)

    async def all(self, report: Report) -> None:
        """Every fault in turn; stops at the first that ends an engine."""
        faults: tuple[tuple[str, Callable[[], Awaitable[str]]], ...] = (
            ("client killed before its first token", self._before_first_token),
            ("client killed in mid-stream", self._in_mid_stream),
            ("prefill leg aborted", self._prefill_leg),
            ("decode leg aborted", self._decode_leg),
        )
        for name, fault in faults:
            title = f"drill: {name}"
            self.say(title)
            try:
                seen = await self._in_time(fault)
                found, seconds = await self._recovered()
            except Unchecked as error:
                report.unknown(title, str(error))
                continue
            except AskError as error:
                problems = [f"{error}", *await self.engines.health()]
                report.add(title, problems, "", _REMEDY)
                if len(problems) > 1:
                    return
                continue
            said = f"{seen}; all released after {seconds:.1f} s, next answer right"
            report.add(title, found, said, _REMEDY)

    async def _in_time(self, fault: Callable[[], Awaitable[str]]) -> str:
        """A fault, sooner where it came too late."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(TooLate):
                return await fault()
            self.usual_seconds /= SOONER
        return await fault()

    async def _recovered(self) -> tuple[list[str], float]:
        """What is wrong afterwards, and how long it took until nothing was held."""
        began = time.monotonic()
        problems = await self.engines.held(self.bound)
        seconds = time.monotonic() - began
        problems += await self.engines.health()
        body, name = self._request()
        verdict = compare(self.expected, await self.way.answer(body, name), self.margin)
        if verdict.kind not in (Kind.EQUAL, Kind.TIE):
            problems.append(f"the next request's answer is wrong: {verdict.text}")
        return problems + await self.engines.held(self.bound), seconds

    async def _before_first_token(self) -> str:
        body, name = self._request()
        return await self._cut(self.way.answer({**body, "stream": True}, name))

    async def _in_mid_stream(self) -> str:
        body, name = self._request(STREAMED_TOKENS)
        seen = await self.way.hang_up(body, name, CUT_AFTER_EVENTS)
        if seen < CUT_AFTER_EVENTS:
            raise Unchecked(f"the stream had ended after {seen} events")
        return f"cut after {seen} events of {STREAMED_TOKENS} tokens"

    async def _prefill_leg(self) -> str:
        body, name = self._request()
        transfer_id = new_transfer_id()
        prefill = self.legs.prefill_leg(body, transfer_id, name)
        if self.legs.mode != "push":
            return await self._cut(prefill)
        return await self._beside(
            self.legs.decode_leg(body, transfer_id, name), prefill
        )

    async def _decode_leg(self) -> str:
        body, name = self._request()
        transfer_id = new_transfer_id()
        prefill = self.legs.prefill_leg(body, transfer_id, name)
        if self.legs.mode == "push":
            decode = self.legs.decode_leg(body, transfer_id, name)
            return await self._beside(prefill, decode)
        first = await prefill
        # Long enough to be dropped, while KV is read or an answer is made of it.
        body = {**body, "max_tokens": STREAMED_TOKENS}
        return await self._cut(
            self.legs.decode_leg(body, transfer_id, name, first), 0.0
        )

    async def _beside(
        self, kept: Coroutine[Any, Any, Answer], dropped: Coroutine[Any, Any, Answer]
    ) -> str:
        """Drop one leg; the other has to end by itself, with an error or an answer."""
        task = asyncio.create_task(kept)
        try:
            seen = await self._cut(dropped)
            done, _ = await asyncio.wait({task}, timeout=self.bound)
            if not done:
                raise AskError(f"the other leg has not ended within {self.bound:.0f} s")
            try:
                task.result()
            except AskError as error:
                # An engine that is gone has no status, and is no way to end.
                if error.status is None:
                    raise
                return f"{seen}, the other leg ended with {error.status}"
            return f"{seen}, the other leg was answered"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AskError):
                await task

    async def _cut(self, work: Coroutine[Any, Any, Answer], share: float = 1.0) -> str:
        """Hang up on a request while it is computed."""
        seconds = max(share * CUT_AT * self.usual_seconds, LEAST_S)
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                task.result()
                raise TooLate(
                    f"the request was answered within {1e3 * seconds:.0f} ms, before "
                    "it could be dropped: raise --long-tokens"
                )
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AskError):
                await task
        return f"dropped after {1e3 * seconds:.0f} ms"

    def _request(self, tokens: int | None = None) -> tuple[Body, str]:
        """One more request for the prompt, of which nothing is cached."""
        name = f"{self.run}-drill{next(self._numbers):03d}"
        body = greedy(self.model, self.prompt, name)
        return (body if tokens is None else {**body, "max_tokens": tokens}), name
