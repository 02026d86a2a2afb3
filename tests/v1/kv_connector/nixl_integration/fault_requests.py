# SPDX-License-Identifier: Apache-2.0
"""Requests that may fail, healthy traffic, and what is right for both."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import aiohttp

import kv_integrity
from fault_engines import FaultPair
from handoff_client import (
    COMPLETIONS,
    Body,
    completion,
    decode_params,
    integrity,
    new_transfer_id,
    prefill_params,
    side_channel_address,
)
from handoff_engines import SPEC
from handoff_workload import Ask, References, Tokens, words
from pd_launcher import Engine
from pd_processes import ServerProcess
from tiny_model import random_prompt

CLEAN_S = 30.0
NUDGE_EVERY_S = 1.0
HEALTHY_TOKENS = 8
HEALTHY_AT_ONCE = 2
FILLERS = 9
REFERENCES_AT_ONCE = 8

NO_ANSWER = 0
ABORTED = -1


@dataclass(frozen=True)
class Outcome:
    """How a request has ended.

    ``status`` is the HTTP status, 500 also for a stream that ended in an error;
    ``NO_ANSWER`` where the connection broke, ``ABORTED`` where we hung up.
    """

    status: int
    tokens: Tokens = ()
    text: str = ""
    ended_at: float = 0.0

    def __str__(self) -> str:
        if self.status == 200:
            return f"200 with {len(self.tokens)} tokens"
        return f"{self.status} {self.text[:200]}"


class Requests:
    """Sends requests; none of its coroutines raises because one fails."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def send(
        self, engine: ServerProcess, body: Body, first: asyncio.Event | None = None
    ) -> Outcome:
        """One request to an engine or a router.

        With ``first`` it streams, and sets that at the first event.
        """
        try:
            if first is None:
                status, tokens, text = await self._whole(engine, body)
            else:
                status, tokens, text = await self._stream(engine, body, first)
        except asyncio.CancelledError:
            return Outcome(ABORTED, ended_at=time.monotonic())
        except (aiohttp.ClientError, OSError) as error:
            status, tokens, text = NO_ANSWER, (), f"{type(error).__name__}: {error}"
        return Outcome(status, tokens, text, time.monotonic())

    async def _whole(
        self, engine: ServerProcess, body: Body
    ) -> tuple[int, Tokens, str]:
        url = engine.url + COMPLETIONS
        async with self._session.post(url, json=body) as response:
            text = await response.text()
            if response.status != 200:
                return response.status, (), text
            answer = json.loads(text)["choices"][0]["text"]
            return 200, words(answer), text

    async def _stream(
        self, engine: ServerProcess, body: Body, first: asyncio.Event
    ) -> tuple[int, Tokens, str]:
        url = engine.url + COMPLETIONS
        parts: list[str] = []
        async with self._session.post(url, json={**body, "stream": True}) as response:
            if response.status != 200:
                return response.status, (), await response.text()
            async for raw in response.content:
                data = raw.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return 200, words("".join(parts)), ""
                if not data:
                    continue
                event = json.loads(data)
                if "error" in event:
                    return 500, (), data
                parts.append(event["choices"][0]["text"])
                first.set()
        return NO_ANSWER, (), "the stream ended without [DONE]"


class HandOff:
    """One prompt's two legs, which are sent and looked after one by one.

    ``earlier`` is the ``transfer_id`` of the conversation's turn before, if any.
    """

    def __init__(
        self,
        requests: Requests,
        pair: FaultPair,
        name: str,
        ask: Ask,
        earlier: str | None = None,
    ) -> None:
        self.name = name
        self.earlier = earlier
        self.ask = ask
        self.transfer_id = new_transfer_id(f"{name}.")
        self.prefill: asyncio.Task[Outcome] | None = None
        self.decode: asyncio.Task[Outcome] | None = None
        self.first_event = asyncio.Event()
        self.decode_sent_at = 0.0
        self._requests = requests
        self._pair = pair
        self._pull_params: Body | None = None

    def send_prefill(self, prompt: Tokens | None = None) -> None:
        """Send the prefill leg; with another prompt, if given."""
        params = prefill_params(self.transfer_id)
        if self.earlier is not None:
            host, port = side_channel_address(self._pair.decode)
            params |= {
                "retained_transfer_id": self.earlier,
                "remote_host": host,
                "remote_port": port,
            }
        body = completion(Ask(prompt or self.ask.prompt, 1), kv_transfer_params=params)
        self.prefill = asyncio.create_task(
            self._requests.send(self._pair.prefill, body)
        )

    async def prefilled(self) -> Outcome:
        """Wait for the prefill leg's end, which gives a pull its params."""
        assert self.prefill is not None
        outcome = await self.prefill
        if outcome.status == 200:
            answer: Body = json.loads(outcome.text)
            self._pull_params = answer["kv_transfer_params"]
        return outcome

    def send_decode(
        self, address: tuple[str, int] | None = None, hint: bool = True
    ) -> None:
        """Send the decode leg; to another side channel, if given.

        Without ``hint`` it does not say where the KV lies.
        """
        if self._pair.mode == "push" or self._pull_params is None:
            params = decode_params(self.transfer_id, self._pair.prefill)
        else:
            params = {**self._pull_params, "transfer_id": self.transfer_id}
        if not hint:
            params = {**params, "remote_generation": None}
        if self.earlier is not None:
            params = {**params, "release_transfer_id": self.earlier}
        if address is not None:
            params = {**params, "remote_host": address[0], "remote_port": address[1]}
        ask = replace(self.ask, stream=False)
        body = completion(ask, kv_transfer_params=params)
        first = self.first_event if self.ask.stream else None
        self.decode_sent_at = time.monotonic()
        self.decode = asyncio.create_task(
            self._requests.send(self._pair.decode, body, first)
        )

    async def run(self) -> Outcome:
        """Both legs, as a router sends them."""
        self.send_prefill()
        if self._pair.mode == "push":
            self.send_decode()
        outcome = await self.prefilled()
        if self._pair.mode == "pull":
            if outcome.status != 200:
                return outcome
            self.send_decode()
        assert self.decode is not None
        return await self.decode


class Traffic:
    """Requests that no fault touches, one after the other, until it is ended."""

    def __init__(self, references: References, send: Callable[[Ask], Any]) -> None:
        self._references = references
        self._send = send
        self._stop = False
        self._asks = itertools.cycle(healthy_asks())
        self._tasks = [
            asyncio.create_task(self._repeat()) for _ in range(HEALTHY_AT_ONCE)
        ]
        self.answered = 0
        self.problems: list[str] = []

    async def end(self) -> list[str]:
        """Let the last ones end; returns what was wrong."""
        self._stop = True
        await asyncio.gather(*self._tasks)
        if not self.answered:
            self.problems.append("no healthy request was answered")
        return self.problems

    async def _repeat(self) -> None:
        # One at least, however soon it is ended.
        for ask in self._asks:
            outcome: Outcome = await self._send(ask)
            self.answered += outcome.status == 200
            problem = wrong(self._references, ask, outcome)
            if outcome.status != 200:
                problem = f"healthy request: {outcome}"
            if problem is not None:
                self.problems.append(problem)
                return
            if self._stop:
                return
            # An engine that is always busy would hide what an idle one keeps.
            await asyncio.sleep(0.05)


def wrong(references: References, ask: Ask, outcome: Outcome) -> str | None:
    """Say what is wrong with the text of an answer, if it is one."""
    return references.check(ask, outcome.tokens) if outcome.status == 200 else None


async def clean(requests: Requests, engine: Engine, seconds: float = CLEAN_S) -> str:
    """Wait until an engine holds nothing; returns what it holds, or nothing.

    It is given something to do meanwhile: an idle engine releases at its next step.
    """
    address = side_channel_address(engine)
    deadline = time.monotonic() + seconds
    while True:
        outcome = await requests.send(engine, completion(Ask((5,), 2)))
        if outcome.status != 200:
            return f"{engine.name} does not work: {outcome}"
        document = await asyncio.to_thread(
            kv_integrity.wait_released, address, NUDGE_EVERY_S
        )
        if kv_integrity.released(document) and not any(document["pins"].values()):
            return ""
        if time.monotonic() > deadline:
            return f"{engine.name} holds after {seconds:g} s: {document}"


async def quarantined(requests: Requests, engine: Engine) -> int:
    """Blocks of an engine that wait for a proof, as of a step from now."""
    await requests.send(engine, completion(Ask((5,), 2)))
    document = await integrity(engine)
    count: int = document["pins"]["quiescing"]
    return count


def _asks(seed: str, lengths: Iterable[int], max_tokens: int) -> tuple[Ask, ...]:
    rng = random.Random(seed)
    return tuple(
        Ask(tuple(random_prompt(length, rng, SPEC)), max_tokens) for length in lengths
    )


@cache
def healthy_asks() -> tuple[Ask, ...]:
    """Small prompts."""
    return _asks("healthy", range(20, 420, 17), HEALTHY_TOKENS)


@cache
def filler_asks() -> tuple[Ask, ...]:
    """Prompts that fill what is left of a cache, and stay for a while."""
    return _asks("filler", [1100] * FILLERS, 96)


def stage_ask(stage: str) -> Ask:
    """The request that is put into a stage."""
    return _stage_asks().get(stage) or _other_asks()[hash_of(stage) % OTHERS]


OTHERS = 12
_LENGTHS = {
    "before_registration": 500,
    "registered": 450,
    "mid_prefill": 3000,
    "mid_write": 700,
    "written": 400,
    "finished": 550,
    "leased": 600,
    "mid_read": 700,
    "read": 350,
}


def hash_of(text: str) -> int:
    """A number that is the same in every run."""
    return sum(text.encode())


@cache
def _stage_asks() -> dict[str, Ask]:
    asks = {stage: _asks(stage, [length], 16)[0] for stage, length in _LENGTHS.items()}
    (long,) = _asks("decoding", [200], 256)
    return {**asks, "decoding": Ask(long.prompt, long.max_tokens, stream=True)}


@cache
def _other_asks() -> tuple[Ask, ...]:
    return _asks("other", range(70, 70 + OTHERS * 30, 30), 8)


def all_fault_asks() -> list[Ask]:
    """Whatever a fault test may compare."""
    return [*healthy_asks(), *filler_asks(), *_stage_asks().values(), *_other_asks()]


async def make_references(
    requests: Requests, engine: Engine, asks: Sequence[Ask]
) -> References:
    """What an engine answers without any hand-off.

    Raises:
        AssertionError: it does not answer.
    """
    turns = asyncio.Semaphore(REFERENCES_AT_ONCE)

    async def one(ask: Ask) -> Tokens:
        async with turns:
            outcome = await requests.send(
                engine, completion(replace(ask, stream=False))
            )
            assert outcome.status == 200, f"{engine.name} does not answer: {outcome}"
            return outcome.tokens

    answers = await asyncio.gather(*map(one, asks))
    return References(
        {ask.prompt: answer for ask, answer in zip(asks, answers, strict=True)}
    )


@dataclass
class Verdict:
    """What a scenario has shown, by stage and on the whole."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, stage: str, problem: str | None) -> None:
        """Note what is wrong with one stage, if something is."""
        if problem:
            self.problems.setdefault(stage, []).append(problem)

    def add_common(self, *problems: str | None) -> None:
        """Note what is wrong as a whole."""
        self.common += [problem for problem in problems if problem]
