# SPDX-License-Identifier: Apache-2.0
"""Caches that are too small for what is asked: requests wait or start over."""

from __future__ import annotations

import asyncio
import time

import pytest

from handoff_client import (
    Client,
    Reply,
    completion,
    decode_params,
    integrity,
    new_transfer_id,
    prefill_params,
)
from handoff_workload import Ask, References, fresh
from pd_launcher import Engine, Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

PREEMPTIONS = "vllm:num_preemptions_total"


async def test_preemption_on_prefill(
    client: Client, pair: Pair, references: References
) -> None:
    before = (await client.metrics(pair.prefill))[PREEMPTIONS]
    # Answers of requests that P keeps for itself grow meanwhile.
    beside = [
        asyncio.create_task(
            client.post(pair.prefill, completion(Ask(prompt, max_tokens=600)))
        )
        for prompt in fresh("beside")
    ]
    asks = [Ask(prompt) for prompt in fresh("preempted")]

    answers = await client.answers(pair.router, asks, len(asks))
    kept = await asyncio.gather(*beside)

    after = (await client.metrics(pair.prefill))[PREEMPTIONS]
    print(f"P preempted {after - before:.0f} times")
    assert references.problems(answers) == []
    for prompt, reply in zip(fresh("beside"), kept, strict=True):
        assert reply.tokens[:16] == references.expected(prompt)
    assert after > before, "P did not preempt: ask for more at once"


async def test_decode_is_full(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    asks = [Ask(prompt) for prompt in fresh("full")]
    waited: list[int] = []
    requests = asyncio.create_task(client.answers(pair.router, asks, len(asks)))
    while not requests.done():
        waited.append(await _waiting(client, pair.decode))
        await asyncio.sleep(0.02)

    assert references.problems(await requests) == []
    print(f"up to {max(waited)} requests waited for blocks on D")
    # In pull P, as full as D, may hand over no faster than D can take.
    assert mode == "pull" or max(waited) > 0


# In pull D asks only for what P has computed.
@pytest.mark.parametrize("mode", ["push"])
async def test_full_caches_in_opposite_order(
    client: Client, pair: Pair, references: References
) -> None:
    """P holds what D has no room for, D reserves room for what P cannot compute."""
    prompts = fresh("crossed")
    ids = [new_transfer_id() for _ in prompts]
    legs: dict[int, asyncio.Task[Reply]] = {}
    prefills: list[asyncio.Task[Reply]] = []
    for place, prompt in enumerate(prompts):
        last = len(prompts) - 1 - place
        first = completion(
            Ask(prompt, 1), kv_transfer_params=prefill_params(ids[place])
        )
        second = completion(
            Ask(prompts[last]),
            kv_transfer_params=decode_params(ids[last], pair.prefill),
        )
        prefills.append(asyncio.create_task(client.post(pair.prefill, first)))
        legs[last] = asyncio.create_task(client.post(pair.decode, second))
        # So far apart that the engines keep the order.
        await asyncio.sleep(0.05)
    started = time.monotonic()

    replies = {place: await leg for place, leg in legs.items()}
    await asyncio.gather(*prefills)

    seconds = time.monotonic() - started
    statuses = [replies[place].status for place in sorted(replies)]
    print(f"in opposite order D answered {statuses} within {seconds:.0f} s")
    assert set(statuses) <= {200, 500}
    for place, reply in replies.items():
        if reply.status == 200:
            assert reply.tokens == references.expected(prompts[place])
    assert statuses.count(200) >= len(prompts) // 2


async def _waiting(client: Client, engine: Engine) -> int:
    sizes: dict[str, int] = (await integrity(engine))["tables"]
    return sizes["decode_waiting"]
