# SPDX-License-Identifier: Apache-2.0
"""Requests to routers and engines, and questions about the engines' state."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

import kv_integrity
from handoff_engines import side_channel_params
from handoff_workload import Ask, Tokens, words
from pd_launcher import Engine, Mode, Pair
from pd_processes import ServerProcess
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token

MODEL = "model"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
REQUEST_TIMEOUT_S = 120.0
CLEAN_TIMEOUT_S = 15.0
# An idle engine lets go of blocks, and tells its tables' sizes, at its next step.
NUDGE_EVERY_S = 2.0
AFTER_STEP_S = 0.5
POLL_S = 0.1

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A whole response."""

    status: int
    body: Any

    @property
    def tokens(self) -> Tokens:
        """The first choice's answer."""
        return self.choices[0]

    @property
    def choices(self) -> list[Tokens]:
        """The answers of all choices."""
        assert self.status == 200, f"status {self.status}: {self.body}"
        return [words(choice["text"]) for choice in self.body["choices"]]

    @property
    def chat_text(self) -> str:
        """The first choice's message."""
        assert self.status == 200, f"status {self.status}: {self.body}"
        return str(self.body["choices"][0]["message"]["content"])


def completion(ask: Ask, **more: Any) -> Body:
    """The body of a request for ``ask``."""
    body: Body = {
        "model": MODEL,
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
    }
    if ask.stream:
        body["stream"] = True
    return {**body, **more}


def prefill_params(transfer_id: str | None, receivers: int = 1) -> Body:
    """The prefill leg's ``kv_transfer_params``, as the routers send them."""
    params: Body = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "num_receivers": receivers,
    }
    return params if transfer_id is None else {**params, "transfer_id": transfer_id}


def decode_params(transfer_id: str | None, prefill: Engine) -> Body:
    """The decode leg's, as the push router sends them."""
    params: Body = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **side_channel_params(prefill),
    }
    return params if transfer_id is None else {**params, "transfer_id": transfer_id}


def several(ask: Ask, n: int) -> Body:
    """The body of a request for ``n`` equal answers.

    The engine refuses ``n`` with temperature 0; the best token alone to choose from
    is as greedy.
    """
    return completion(ask, n=n, temperature=1.0, top_k=1)


def new_transfer_id(prefix: str = "") -> str:
    return prefix + uuid.uuid4().hex


class Client:
    """One HTTP session; every request has a deadline."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(
        self,
        server: ServerProcess,
        body: Body,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request and read its whole response."""
        async with self._session.post(
            server.url + path, json=body, headers=headers
        ) as response:
            text = await response.text()
            try:
                return Reply(response.status, json.loads(text))
            except ValueError:
                return Reply(response.status, text)

    async def get(self, server: ServerProcess, path: str) -> Reply:
        """Read a whole response."""
        async with self._session.get(server.url + path) as response:
            return Reply(response.status, await response.json())

    async def delete(self, server: ServerProcess, path: str) -> Reply:
        """Send a request to delete something and read its whole response."""
        async with self._session.delete(server.url + path) as response:
            return Reply(response.status, await response.json())

    async def stream(
        self,
        server: ServerProcess,
        body: Body,
        path: str = COMPLETIONS,
        cut: int = -1,
        headers: Mapping[str, str] | None = None,
        begun: asyncio.Event | None = None,
    ) -> str:
        """Read a stream's text; hang up after ``cut`` events, if that is not -1.

        ``begun`` is set at the first event.

        Raises:
            AssertionError: the status is not 200, or an event is an error.
        """
        parts: list[str] = []
        async with self._session.post(
            server.url + path, json={**body, "stream": True}, headers=headers
        ) as response:
            if response.status != 200:
                raise AssertionError(
                    f"status {response.status}: {await response.text()}"
                )
            async for raw in response.content:
                line = raw.decode().strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return "".join(parts)
                event = json.loads(data)
                if begun is not None:
                    begun.set()
                assert "error" not in event, f"the stream holds an error: {event}"
                for choice in event["choices"]:
                    delta = choice.get("delta")
                    text = choice.get("text") if delta is None else delta.get("content")
                    parts.append(text or "")
                cut -= 1
                if cut == 0:
                    return "".join(parts)
        raise AssertionError(f"the stream ended without [DONE] after {parts}")

    async def answer(self, server: ServerProcess, ask: Ask) -> Tokens:
        """Ask for a completion, in the way that ``ask`` says."""
        if ask.stream:
            return words(await self.stream(server, completion(ask)))
        return (await self.post(server, completion(ask))).tokens

    async def answers(
        self, server: ServerProcess, asks: tuple[Ask, ...] | list[Ask], at_once: int
    ) -> list[tuple[Ask, Tokens]]:
        """Ask for several completions, ``at_once`` of them at a time."""
        turns = asyncio.Semaphore(at_once)

        async def one(ask: Ask) -> tuple[Ask, Tokens]:
            async with turns:
                return ask, await self.answer(server, ask)

        return await asyncio.gather(*(one(ask) for ask in asks))

    async def hand_off(
        self,
        pair: Pair,
        mode: Mode,
        body: Body,
        transfer_id: str,
        receivers: int = 1,
    ) -> tuple[Reply, Reply]:
        """Do what a router does, without one; returns both legs' responses."""
        first = {
            **body,
            "max_tokens": 1,
            "n": 1,
            "kv_transfer_params": prefill_params(transfer_id, receivers),
        }
        if mode == "push":
            params = decode_params(transfer_id, pair.prefill)
            second = {**body, "kv_transfer_params": params}
            prefill, decode = await asyncio.gather(
                self.post(pair.prefill, first), self.post(pair.decode, second)
            )
            return prefill, decode
        prefill = await self.post(pair.prefill, first)
        assert prefill.status == 200, prefill
        params = {**prefill.body["kv_transfer_params"], "transfer_id": transfer_id}
        second = {**body, "kv_transfer_params": params}
        return prefill, await self.post(pair.decode, second)

    async def metrics(self, server: ServerProcess) -> dict[str, float]:
        """The samples of ``/metrics`` by name; those of a ``source`` by both."""
        samples: dict[str, float] = {}
        async with self._session.get(server.url + "/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                source = sample.labels.get("source")
                name = sample.name if source is None else f"{sample.name}.{source}"
                samples[name] = samples.get(name, 0.0) + sample.value
        return samples

    async def nudge(self, engine: Engine) -> None:
        """Let an engine do a few steps."""
        reply = await self.post(engine, completion(Ask((5,), 2)))
        assert reply.status == 200, f"{engine.name} does not work: {reply}"


def side_channel_address(engine: Engine) -> tuple[str, int]:
    return engine.host, engine.side_channel_port


async def integrity(engine: Engine, token: Token | None = None) -> dict[str, Any]:
    """What ``engine`` says that its blocks are held by."""
    return await asyncio.to_thread(
        kv_integrity.integrity, side_channel_address(engine), token=token
    )


async def handoffs(
    engine: Engine, transfer_id: str = "", token: Token | None = None
) -> list[dict[str, Any]]:
    """The latest finished hand-offs, or those of one ``transfer_id``."""
    records = await asyncio.to_thread(
        kv_integrity.handoffs, side_channel_address(engine), token=token
    )
    return [r for r in records if transfer_id in ("", r["transfer_id"])]


async def wait_handoff(
    engine: Engine, transfer_id: str, token: Token | None = None
) -> dict[str, Any]:
    """The record of one hand-off, as soon as it is over.

    Raises:
        AssertionError: it is not over within the time for cleaning up.
    """
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while time.monotonic() < deadline:
        found = await handoffs(engine, transfer_id, token)
        if found:
            return found[-1]
        await asyncio.sleep(POLL_S)
    raise AssertionError(
        f"{engine.name} has not finished hand-off {transfer_id} within "
        f"{CLEAN_TIMEOUT_S:.0f} s: {await integrity(engine, token)}"
    )


async def assert_clean(client: Client, pair: Pair, token: Token | None = None) -> None:
    """Both engines hold nothing, are alive and answer."""
    engines = (pair.prefill, pair.decode)
    await asyncio.gather(*(_assert_clean(client, engine, token) for engine in engines))


async def _assert_clean(client: Client, engine: Engine, token: Token | None) -> None:
    address = side_channel_address(engine)
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        # Also where nothing is held: this shows that the engine still works.
        await client.nudge(engine)
        document = await asyncio.to_thread(
            kv_integrity.wait_released, address, AFTER_STEP_S, token
        )
        if kv_integrity.released(document):
            break
        assert time.monotonic() < deadline, f"{engine.name} holds: {document}"
    assert not any(document["pins"].values()), f"{engine.name} pins: {document}"
    assert engine.running, f"{engine.name} ended with status {engine.returncode}"
