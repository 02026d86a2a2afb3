# SPDX-License-Identifier: Apache-2.0
"""What is counted: KV is really moved, all of it is used, and no more than needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from handoff_client import (
    CLEAN_TIMEOUT_S,
    POLL_S,
    Client,
    Reply,
    completion,
    new_transfer_id,
    wait_handoff,
)
from handoff_engines import BLOCK_BYTES, BLOCK_SIZE
from handoff_workload import Ask, References, Tokens, fresh
from pd_launcher import Engine, Mode, Pair

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

COMPUTED = "vllm:prompt_tokens_by_source_total.local_compute"
EXTERNAL = "vllm:prompt_tokens_by_source_total.external_kv_transfer"
BYTES = "vllm:nixl_bytes_transferred_sum"
TRANSFERS = "vllm:nixl_bytes_transferred_count"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


async def _handed_off(
    client: Client, pair: Pair, mode: Mode, prompt: Tokens
) -> tuple[Reply, dict[str, object], dict[str, object]]:
    """Hand one prompt off; returns D's answer, D's record and P's record."""
    transfer_id = new_transfer_id()
    body = completion(Ask(prompt))
    _, decode = await client.hand_off(pair, mode, body, transfer_id)
    taken = await wait_handoff(pair.decode, transfer_id)
    given = await wait_handoff(pair.prefill, transfer_id)
    return decode, taken, given


async def _metrics_when(
    client: Client, engine: Engine, sample: str, least: float
) -> dict[str, float]:
    """An engine's metrics, which follow its steps, once a sample has come so far."""
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        found = await client.metrics(engine)
        if found.get(sample, 0.0) >= least or time.monotonic() > deadline:
            return found
        await client.nudge(engine)
        await asyncio.sleep(POLL_S)


async def test_decode_computes_the_last_token_only(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    prompts = fresh("moved")
    mover = pair.prefill if mode == "push" else pair.decode
    before, moved_before = (
        await client.metrics(pair.decode),
        await client.metrics(mover),
    )

    received = transfers = 0
    for prompt in prompts:
        decode, taken, _ = await _handed_off(client, pair, mode, prompt)
        assert decode.tokens == references.expected(prompt)
        if len(prompt) > 1:
            received += 1
            assert taken["outcome"] == "received", taken
            assert taken["tokens"] == len(prompt), taken
            assert taken["bytes"] == _blocks(len(prompt)) * BLOCK_BYTES, taken
            chunks = taken["chunks"]
            assert isinstance(chunks, int)
            transfers += chunks

    after = await client.metrics(pair.decode)
    # The engine counts a prompt's last token as received, although it computes it.
    single_tokens = len(prompts) - received
    assert after[COMPUTED] - before[COMPUTED] == single_tokens
    expected = sum(len(prompt) for prompt in prompts) - single_tokens
    assert after[EXTERNAL] - before[EXTERNAL] == expected
    size = _moved_bytes(prompts)
    least = moved_before.get(BYTES, 0.0) + size
    moved = await _metrics_when(client, mover, BYTES, least)
    assert moved[BYTES] - moved_before.get(BYTES, 0.0) == size
    assert moved[TRANSFERS] - moved_before.get(TRANSFERS, 0.0) == transfers
    # Long prompts are computed in chunks, and pushed in as many.
    assert transfers > received if mode == "push" else transfers == received


def _moved_bytes(prompts: Iterable[Tokens]) -> int:
    blocks = sum(_blocks(len(prompt)) for prompt in prompts if len(prompt) > 1)
    return blocks * BLOCK_BYTES


async def test_cached_blocks_are_not_moved(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    (prompt, _, other) = fresh("cached")
    await _handed_off(client, pair, mode, prompt)

    decode, taken, given = await _handed_off(client, pair, mode, prompt)

    assert decode.tokens == references.expected(prompt)
    cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for record in (taken, given):
        assert record["tokens"] == len(prompt) - cached, record
    assert taken["bytes"] == BLOCK_BYTES, taken
    assert given["outcome"] == "served", given

    # A long prompt whose beginning alone is known: the rest goes to its place.
    await client.post(pair.decode, completion(Ask(other[:200])))
    decode, taken, _ = await _handed_off(client, pair, mode, other)

    assert decode.tokens == references.expected(other)
    cached = 200 // BLOCK_SIZE * BLOCK_SIZE
    assert taken["tokens"] == len(other) - cached, taken
    assert taken["bytes"] == (_blocks(len(other)) - cached // BLOCK_SIZE) * BLOCK_BYTES


async def test_full_hit_is_told(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    (_, prompt, _) = fresh("cached")
    assert len(prompt) % BLOCK_SIZE == 1
    await _handed_off(client, pair, mode, prompt)

    decode, taken, given = await _handed_off(client, pair, mode, prompt)

    assert decode.tokens == references.expected(prompt)
    assert taken["outcome"] == "not_needed", taken
    # Not "expired": P has heard of it and not waited for the lease to end.
    assert given["outcome"] == "released", given
    assert given["tokens"] == given["bytes"] == 0, given
