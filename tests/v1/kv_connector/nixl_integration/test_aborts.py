# SPDX-License-Identifier: Apache-2.0
"""Whoever leaves, whenever: no block stays held, and the next request works."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from handoff_client import (
    Client,
    Reply,
    assert_clean,
    completion,
    decode_params,
    integrity,
    new_transfer_id,
    prefill_params,
)
from handoff_workload import Ask, References, Tokens, fresh
from pd_launcher import Engine, Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

AT_ONCE = 8
# What a router would have to say of a failed hand-off, or of one that worked.
LEG_STATUS = {200, 500}


@contextlib.asynccontextmanager
async def _asking(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a request beside the block, and hang up when that is left."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _wait_table(engine: Engine, table: str, task: asyncio.Task[Any]) -> bool:
    """Wait until a table has an entry; false if the request ends before that."""
    while not task.done():
        if (await integrity(engine))["tables"][table]:
            return True
        await asyncio.sleep(0.002)
    return False


async def test_clients_hang_up(
    client: Client, pair: Pair, references: References
) -> None:
    rng = random.Random(7)
    turns = asyncio.Semaphore(AT_ONCE)
    finished: list[tuple[Ask, Tokens]] = []

    async def hang_up_after(prompt: Tokens, seconds: float) -> None:
        ask = Ask(prompt, stream=rng.random() < 0.5)
        async with turns, _asking(client.answer(pair.router, ask)) as task:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                finished.append((ask, task.result()))

    async def hang_up_in_decode(prompt: Tokens, events: int) -> None:
        async with turns:
            text = await client.stream(pair.router, completion(Ask(prompt)), cut=events)
            assert text

    work: list[Coroutine[Any, Any, None]] = []
    for prompt in fresh("disconnect"):
        match rng.randrange(4):
            case 0:
                work.append(hang_up_after(prompt, rng.uniform(0, 0.01)))
            case 1 | 2:
                work.append(hang_up_after(prompt, rng.uniform(0.01, 0.6)))
            case _:
                work.append(hang_up_in_decode(prompt, rng.randint(1, 6)))
    await asyncio.gather(*work)

    assert references.problems(finished) == []
    await assert_clean(client, pair)
    (prompt, *_) = fresh("after")
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)


async def test_client_hangs_up_after_registration(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    """In push D waits for KV then; in pull P is the one that has begun."""
    seen = 0
    for prompt in fresh("late"):
        async with _asking(client.answer(pair.router, Ask(prompt))) as task:
            if mode == "push":
                seen += await _wait_table(pair.decode, "loads", task)
            else:
                seen += await _wait_table(pair.prefill, "prefill_waiting", task)
        await assert_clean(client, pair)

    assert seen, "no request was caught in the act: the prompts are too short"
    prompt = fresh("late")[0]
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_leg_is_aborted(
    client: Client, pair: Pair, mode: Mode, references: References, leg: str
) -> None:
    """The other leg ends by itself, with an error or with the right answer."""
    rng = random.Random(leg)
    half = len(fresh("legs")) // 2
    prompts = fresh("legs")[:half] if leg == "prefill" else fresh("legs")[half:]
    outcomes: list[int] = []
    for number, prompt in enumerate(prompts):
        delay = rng.uniform(0, 0.02) if number % 2 else rng.uniform(0.02, 0.5)
        run = _push_without if mode == "push" else _pull_without
        reply = await run(client, pair, prompt, leg, delay)
        if reply is None:
            continue
        outcomes.append(reply.status)
        assert reply.status in LEG_STATUS, reply
        if reply.status == 200 and leg == "prefill":
            assert reply.tokens == references.expected(prompt)
    print(f"{mode}: {leg} aborted, the other leg answered {outcomes}")

    await assert_clean(client, pair)
    prompt = prompts[0]
    assert await client.answer(pair.router, Ask(prompt)) == references.expected(prompt)


def _legs(
    client: Client, pair: Pair, prompt: Tokens
) -> tuple[
    Callable[[], Coroutine[Any, Any, Reply]],
    Callable[[dict[str, Any] | None], Coroutine[Any, Any, Reply]],
]:
    transfer_id = new_transfer_id()
    body = completion(Ask(prompt))

    async def prefill() -> Reply:
        params = prefill_params(transfer_id)
        return await client.post(
            pair.prefill, {**body, "max_tokens": 1, "kv_transfer_params": params}
        )

    async def decode(answered: dict[str, Any] | None) -> Reply:
        params = answered or decode_params(transfer_id, pair.prefill)
        return await client.post(pair.decode, {**body, "kv_transfer_params": params})

    return prefill, decode


async def _push_without(
    client: Client, pair: Pair, prompt: Tokens, leg: str, delay: float
) -> Reply:
    prefill, decode = _legs(client, pair, prompt)
    decode_now = partial(decode, None)
    kept, cut = (prefill, decode_now) if leg == "decode" else (decode_now, prefill)
    async with _asking(kept()) as task:
        async with _asking(cut()):
            await asyncio.sleep(delay)
        reply: Reply = await task
    return reply


async def _pull_without(
    client: Client, pair: Pair, prompt: Tokens, leg: str, delay: float
) -> Reply | None:
    """Pull has one leg at a time: the other is not sent, or was answered before."""
    prefill, decode = _legs(client, pair, prompt)
    if leg == "prefill":
        async with _asking(prefill()) as task:
            done, _ = await asyncio.wait({task}, timeout=delay)
        if not done:
            return None
        answered: Reply = task.result()
        return await decode(answered.body["kv_transfer_params"])
    first = await prefill()
    async with _asking(decode(first.body["kv_transfer_params"])):
        await asyncio.sleep(delay)
    return first


# A pull router has nothing to tell D before P has answered.
@pytest.mark.parametrize("mode", ["push"])
async def test_prefill_leg_never_comes(client: Client, pair: Pair) -> None:
    """P tells a decode engine that waits for nothing, once the lease has ended."""
    started = time.monotonic()
    (_, prompt, *_) = fresh("after")
    _, decode = _legs(client, pair, prompt)

    reply = await decode(None)

    assert reply.status == 500, reply
    print(f"D gave up after {time.monotonic() - started:.1f} s")


async def test_decode_leg_never_comes(
    client: Client, pair: Pair, references: References
) -> None:
    """P lets go of the KV once the lease has ended."""
    (_, _, prompt, *_) = fresh("after")
    prefill, _ = _legs(client, pair, prompt)

    reply = await prefill()

    assert reply.tokens == references.expected(prompt, 1)
    held = await integrity(pair.prefill)
    assert held["pins"]["exposed_for_send"] > 0
