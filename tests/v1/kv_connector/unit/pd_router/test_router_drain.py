# SPDX-License-Identifier: Apache-2.0
"""The router scripts as processes: start, drain on a signal, exit status."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router_backends import (
    DONE,
    Engine,
    Script,
    answers,
    free_port,
    prefill_answer,
    streams,
    token,
)

pytestmark = pytest.mark.asyncio

SCRIPTS = (
    Path(__file__).resolve().parents[5] / "examples/disaggregated/disaggregated_serving"
)
STREAM = {"prompt": "p", "stream": True}


class Process:
    """A router script that is running."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.client = aiohttp.ClientSession(url)

    async def status(self, path: str) -> int:
        async with self.client.get(path) as response:
            return response.status

    async def exit_status(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@asynccontextmanager
async def running(
    script: str, decode: Script, *flags: str
) -> AsyncIterator[tuple[Process, Engine, Engine]]:
    source, sink = Engine(answers(prefill_answer())), Engine(decode)
    await source.start()
    await sink.start()
    port = free_port()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPTS / script),
        *("--port", str(port), "--health-interval", "0.1"),
        *("--prefill", str(source.address), "--decode", str(sink.address)),
        *flags,
        cwd="/",
    )
    process = Process(child, f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    if await process.status("/ready") == 200:
                        break
                except aiohttp.ClientConnectionError:
                    assert child.returncode is None
                await asyncio.sleep(0.05)
        yield process, source, sink
    finally:
        await process.client.close()
        if child.returncode is None:
            child.kill()
        await child.wait()
        await source.stop()
        await sink.stop()


def gated(gate: asyncio.Event) -> Script:
    async def script(seen: Any) -> Any:
        await gate.wait()
        return await streams(token("a"), DONE)(seen)

    return script


@pytest.mark.parametrize(
    "script", ["disagg_proxy_demo.py", "disagg_proxy_pushconnector_demo.py"]
)
async def test_sigterm_lets_running_requests_end(script: str) -> None:
    gate = asyncio.Event()
    async with running(script, gated(gate)) as (router, _, sink):
        asking = asyncio.create_task(router.client.post("/v1/completions", json=STREAM))
        await sink.request()
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while await router.status("/ready") != 503:
                await asyncio.sleep(0.02)
        assert await router.status("/health") == 200
        async with router.client.post("/v1/completions", json=STREAM) as refused:
            assert refused.status == 503
            error = (await refused.json())["error"]
            assert (error["type"], error["retryable"]) == ("shutting_down", True)
            assert refused.headers["Connection"] == "close"
        assert router.process.returncode is None
        gate.set()
        async with await asking as response:
            assert (response.status, await response.read()) == (200, token("a") + DONE)
        assert await router.exit_status() == 0
        assert len(sink.seen) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_draining_is_bounded(begun: bool) -> None:
    script = streams(*([token("a")] if begun else []), end="hang")
    async with running(
        "disagg_proxy_pushconnector_demo.py", script, "--drain-timeout", "0.5"
    ) as (router, _, sink):
        asking = asyncio.create_task(router.client.post("/v1/completions", json=STREAM))
        seen = await sink.request()
        await asyncio.sleep(0.2)
        router.process.send_signal(signal.SIGTERM)
        async with await asking as response:
            body = await response.read()
            assert response.status == (200 if begun else 503)
        assert b"shutting_down" in body
        assert b"[DONE]" not in body
        assert await router.exit_status() == 0
        async with asyncio.timeout(5):
            await seen.disconnected.wait()


async def test_a_second_signal_does_not_wait() -> None:
    script = streams(token("a"), end="hang")
    async with running("disagg_proxy_demo.py", script, "--drain-timeout", "60") as (
        router,
        _,
        sink,
    ):
        asking = asyncio.create_task(router.client.post("/v1/completions", json=STREAM))
        await sink.request()
        router.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(5):
            while await router.status("/ready") != 503:
                await asyncio.sleep(0.02)
        router.process.send_signal(signal.SIGINT)
        assert await router.exit_status() == 0
        (await asking).close()


async def test_an_idle_router_exits_at_once() -> None:
    async with running("disagg_proxy_demo.py", answers()) as (router, _, _sink):
        router.process.send_signal(signal.SIGTERM)
        assert await router.exit_status() == 0
