# SPDX-License-Identifier: Apache-2.0
"""Later turns of a conversation: P reads back what D keeps, and nothing is wrong."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from field_routers import FIELD
from field_routers import decode_params as field_decode_params
from handoff_client import (
    CLEAN_TIMEOUT_S,
    POLL_S,
    Client,
    assert_clean,
    completion,
    integrity,
    new_transfer_id,
    side_channel_address,
    wait_handoff,
)
from handoff_cpu import LIMIT, idle_workers
from handoff_engines import BLOCK_SIZE, EngineRoom
from handoff_turns import Talk, forget, reading, take_turn
from handoff_workload import MAX_TOKENS, Ask, References, conversations, words
from pd_launcher import Engine, Mode, Pair
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import query
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    Lookup,
    Release,
    Report,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

COMPUTED = "vllm:prompt_tokens_by_source_total.local_compute"
PREEMPTIONS = "vllm:num_preemptions_total"
THRESHOLD = 64
QUESTION_S = 5.0


@pytest_asyncio.fixture
async def pair(
    room: EngineRoom, references: References, mode: Mode, client: Client
) -> AsyncIterator[Pair]:
    """Two engines that keep conversations, and hold nothing once that is dropped."""
    running = room.pair(mode, f"{mode}-prefill-turns", f"{mode}-decode-turns")
    yield running
    await forget(client, running.decode)
    await assert_clean(client, running)


async def _computed(client: Client, engine: Engine, least: float = 0.0) -> float:
    """Prompt tokens that an engine has computed, once they are so many.

    D may answer before P has counted.
    """
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        count = (await client.metrics(engine)).get(COMPUTED, 0.0)
        if count >= least or time.monotonic() > deadline:
            return count
        await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("conversation", ["whole", "streamed"])
async def test_every_turn_is_right_and_computes_what_is_new(
    client: Client,
    pair: Pair,
    mode: Mode,
    references: References,
    conversation: str,
) -> None:
    talk = Talk()
    known = 0
    for prompt in references.turns(conversation):
        earlier = talk.last
        before = await _computed(client, pair.prefill)

        answer = await take_turn(
            client, pair, mode, talk, prompt, stream=conversation == "streamed"
        )

        assert answer == references.expected(prompt)
        taken = await wait_handoff(pair.decode, talk.turns[-1])
        assert taken["outcome"] == "received", taken
        read = 0
        if earlier is not None:
            record = await reading(pair, earlier)
            assert record["outcome"] == "read", record
            # All but the token that was sampled last.
            assert record["tokens"] == known - 1, record
            read = known - 1
        new = len(prompt) - read
        assert await _computed(client, pair.prefill, before + new) - before == new
        known = len(prompt) + MAX_TOKENS
    # Each turn has released the one before it.
    document = await integrity(pair.decode)
    assert document["tables"]["retained"] == 1, document


async def test_an_edited_history_is_read_as_far_as_it_is_the_same(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    first, second, _ = references.turns("edited")
    talk = Talk()
    await take_turn(client, pair, mode, talk, first)
    earlier = talk.last
    # The client has cut the answer out, and a reasoning model's thoughts with it.
    edited = first + second[len(first) + MAX_TOKENS :]
    right = (await client.post(pair.decode, completion(Ask(edited)))).tokens

    answer = await take_turn(client, pair, mode, talk, edited)

    assert answer == right
    record = await reading(pair, earlier)
    assert record["tokens"] == len(first) // BLOCK_SIZE * BLOCK_SIZE, record


async def test_what_is_gone_is_computed(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    first, second, third = references.turns("restarted")
    talk = Talk()
    await take_turn(client, pair, mode, talk, first)
    earlier = talk.last
    assert earlier is not None
    reply = await asyncio.to_thread(
        query,
        side_channel_address(pair.decode),
        Release(TransferId(earlier)),
        QUESTION_S,
    )
    assert isinstance(reply, Report)
    await client.nudge(pair.decode)

    answer = await take_turn(client, pair, mode, talk, second)

    assert answer == references.expected(second)
    record = await reading(pair, earlier)
    assert (record["outcome"], record["tokens"]) == ("missed", 0), record
    # The turn that was computed anew is kept again.
    assert (await take_turn(client, pair, mode, talk, third)) == references.expected(
        third
    )
    assert (await reading(pair, talk.turns[-2]))["outcome"] == "read"


@pytest.mark.full
@pytest.mark.parametrize("mode", ["pull"])
async def test_a_turn_is_named_by_fields_that_other_routers_copy(
    client: Client, pair: Pair, references: References
) -> None:
    """As llm-d's sidecar does it: from D's answer into the next prefill leg."""
    router = FIELD["llm-d pull, bidirectional"]
    told: dict[str, Any] = {}
    for prompt in references.turns("restarted"):
        headers = {"X-Request-Id": new_transfer_id()}
        replayed = {key: told[key] for key in router.conversation if key in told}
        first = {
            **completion(Ask(prompt)),
            **router.capped,
            "kv_transfer_params": {**router.prefill, **replayed},
        }
        prefill = await client.post(pair.prefill, first, headers=headers)
        assert prefill.status == 200, prefill
        relayed = field_decode_params(router, prefill.body["kv_transfer_params"], {})
        second = completion(Ask(prompt), kv_transfer_params=relayed)
        answer = await client.post(pair.decode, second, headers=headers)

        assert answer.tokens == references.expected(prompt)
        if told:
            record = await reading(pair, told["remote_request_id"])
            assert record["outcome"] == "read", record
            assert record["tokens"] == told["remote_num_tokens"], record
        told = answer.body["kv_transfer_params"]


async def test_a_few_tokens_are_not_worth_reading(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    prompt, _ = references.turns("threshold")
    for length, outcome in (
        (THRESHOLD - MAX_TOKENS, "recomputed"),
        (THRESHOLD - MAX_TOKENS + 1, "read"),
    ):
        talk = Talk()
        short = prompt[:length]
        answer = await take_turn(client, pair, mode, talk, short)
        earlier = talk.last
        longer = short + answer + prompt[100:130]
        right = (await client.post(pair.decode, completion(Ask(longer)))).tokens

        assert await take_turn(client, pair, mode, talk, longer) == right
        record = await reading(pair, earlier)
        assert record["outcome"] == outcome, record


async def test_a_whole_answer_says_where_its_kv_is(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    first, second, _ = references.turns("edited")
    transfer_id = new_transfer_id()
    body = completion(Ask(first))
    _, decode = await client.hand_off(pair, mode, body, transfer_id)
    told = decode.body["kv_transfer_params"]
    assert told["remote_num_tokens"] == len(first) + MAX_TOKENS - 1
    assert 0 < told["remote_blocks_expiry_time"] - time.time() < 500
    # The field is there for routers that look for it; it tells no block.
    assert not any(told["remote_block_ids"])

    # Routers that know nothing of it hand the whole dict to the prefill leg.
    reply = await client.post(
        pair.prefill, {**completion(Ask(second, 1)), "kv_transfer_params": told}
    )

    assert reply.tokens == references.expected(second, 1)
    assert (await reading(pair, transfer_id))["outcome"] == "read"


async def test_a_router_remembers_conversations(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    before = await _computed(client, pair.prefill)
    read = 0
    prompts = references.turns("routed")
    for turn, prompt in enumerate(prompts):
        body = completion(Ask(prompt), conversation_id="routed")
        if turn % 2:
            answer = words(await client.stream(pair.router, body))
        else:
            answer = (await client.post(pair.router, body)).tokens
        assert answer == references.expected(prompt)
        read += len(prompt) + MAX_TOKENS - 1 if turn + 1 < len(prompts) else 0

    new = sum(len(prompt) for prompt in prompts) - read
    assert await _computed(client, pair.prefill, before + new) - before == new
    routed = await client.metrics(pair.router)
    assert routed["pd_router_conversations"] == 1
    ended = await client.delete(pair.router, "/conversations/routed")
    assert ended.body == {"ended": True, "released": True}, ended
    await client.nudge(pair.decode)
    document = await integrity(pair.decode)
    assert not document["tables"]["retained"], document


async def test_a_crowd_that_does_not_fit(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    preempted = (await client.metrics(pair.decode))[PREEMPTIONS]
    counted = (await integrity(pair.decode))["counters"]

    async def converse(name: str) -> list[str]:
        talk = Talk()
        problems: list[str] = []
        for prompt in references.turns(name):
            answer = await take_turn(client, pair, mode, talk, prompt)
            problem = references.check(Ask(prompt), answer)
            problems += [] if problem is None else [problem]
        return problems

    names = [name for name in conversations() if name.startswith("crowd")]
    found = await asyncio.gather(*(converse(name) for name in names))

    assert [problem for problems in found for problem in problems] == []
    new = Counter((await integrity(pair.decode))["counters"])
    new.subtract(counted)
    # Some had to give way, and were computed anew.
    assert new["retention_evicted"] > 0
    # No request was preempted while anything kept could have gone instead.
    preempted = (await client.metrics(pair.decode))[PREEMPTIONS] - preempted
    assert preempted <= new["retention_exhausted"]


async def test_an_engine_that_keeps_sleeps(
    client: Client, pair: Pair, mode: Mode, references: References
) -> None:
    (prompt, *_) = references.turns("whole")
    talk = Talk()
    await take_turn(client, pair, mode, talk, prompt)
    assert talk.last is not None
    (worker,) = await idle_workers(pair.decode)
    assert worker < LIMIT
    reply = await asyncio.to_thread(
        query,
        side_channel_address(pair.decode),
        Lookup(TransferId(talk.last)),
        QUESTION_S,
    )
    assert isinstance(reply, Found)
    assert len(reply.kept) == 1
