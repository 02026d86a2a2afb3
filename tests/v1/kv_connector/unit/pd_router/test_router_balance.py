# SPDX-License-Identifier: Apache-2.0
"""Prompts' lengths and beginnings, and the choice that goes by them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.balance import OutstandingTokens
from pd_router.config import Address, Mode, Role, WorkerSpec
from pd_router.prefixes import PrefixMemory
from pd_router.prompt_size import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    MEDIA_TOKENS,
    PromptSize,
)
from pd_router.routing import Balance, BalanceSettings, RoutingSettings
from pd_router.workers import Lease, Registry, Work
from router_backends import CHAT, Cluster, answers, completion, prefill_answer

WORD = "four"


def words(number: int) -> str:
    return WORD * number


def ids(number: int, first: int = 0) -> list[int]:
    return [first + place % 7 for place in range(number)]


# ---- how long


def test_token_ids_are_counted_and_text_is_estimated() -> None:
    assert PromptSize({"prompt": ids(1000)}).tokens == 1000
    assert PromptSize({"prompt": [ids(1000)]}).tokens == 1000
    assert PromptSize({"prompt": words(1000)}).tokens == 1000
    assert PromptSize({"prompt": [words(1000)]}).tokens == 1000
    # A character of three bytes is three quarters of a token.
    assert PromptSize({"prompt": "漢" * 400}).tokens == 300


def test_a_chat_counts_all_that_its_template_may_show() -> None:
    said = {"role": "user", "content": words(100)}
    alone = PromptSize({"messages": [said]}).tokens
    assert 100 <= alone <= 110
    with_tools = PromptSize({"messages": [said], "tools": [{"a": words(50)}]}).tokens
    assert with_tools >= alone + 50
    parts = [{"type": "text", "text": words(10)}, {"type": "image_url", "url": "x"}]
    media = PromptSize({"messages": [{"role": "user", "content": parts}]}).tokens
    assert MEDIA_TOKENS + 10 <= media <= MEDIA_TOKENS + 20


def test_an_answer_counts_what_was_asked_for_up_to_a_limit() -> None:
    assert PromptSize({}).answer_tokens == ANSWER_TOKENS
    assert PromptSize({"max_tokens": 7, "n": 3}).answer_tokens == 21
    assert PromptSize({"max_tokens": 10**9}).answer_tokens == ANSWER_TOKENS
    assert PromptSize({"max_tokens": 9, "max_completion_tokens": 5}).answer_tokens == 5


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = ("prompt", "messages", "tools", "max_tokens", "n", "model", "prompt_embeds")


@given(st.dictionaries(st.sampled_from(NAMES), ODD))
@settings(deadline=None)
def test_no_body_breaks_the_estimates(body: dict[str, Any]) -> None:
    size = PromptSize(body)
    assert size.tokens >= 1
    assert size.answer_tokens >= 1
    assert len(size.chunks) == size.tokens // CHUNK_TOKENS or size.tokens == 1


# ---- how it begins


@given(
    st.lists(st.integers(0, 3), max_size=5 * CHUNK_TOKENS),
    st.lists(st.integers(0, 3), max_size=5 * CHUNK_TOKENS),
)
@settings(deadline=None)
def test_equal_chunks_are_equal_beginnings(one: list[int], other: list[int]) -> None:
    first, second = PromptSize({"prompt": one}), PromptSize({"prompt": other})
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    shared = sum(a == b for a, b in zip(first.chunks, second.chunks, strict=False))
    assert shared == equal // CHUNK_TOKENS


def test_a_conversation_begins_with_its_earlier_turns() -> None:
    turns = [{"role": "user", "content": words(200)}]
    first = PromptSize({"messages": turns}).chunks
    turns += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]
    assert PromptSize({"messages": turns}).chunks[: len(first)] == first


def test_other_models_and_salts_share_nothing() -> None:
    bodies: Sequence[dict[str, Any]] = (
        {},
        {"model": "a"},
        {"model": "b"},
        {"model": "a", "cache_salt": "s"},
    )
    names = [PromptSize({"prompt": words(64), **body}).chunks[0] for body in bodies]
    assert len(set(names)) == len(names)


def test_a_memory_forgets_what_was_used_longest_ago_and_ends_before_beginnings() -> (
    None
):
    memory = PrefixMemory(4 * CHUNK_TOKENS)
    a = PromptSize({"prompt": ids(2 * CHUNK_TOKENS)}).chunks
    b = PromptSize({"prompt": ids(3 * CHUNK_TOKENS, first=50)}).chunks
    memory.note(a)
    memory.note(b)
    assert memory.tokens(b) == 3 * CHUNK_TOKENS
    assert memory.tokens(a) == CHUNK_TOKENS
    assert len(memory) == 4
    memory.clear()
    assert memory.tokens(b) == 0


# ---- the choice


def registry(number: int, max_load: float | None) -> Registry:
    workers = Registry(OutstandingTokens(max_load))
    for port in range(1, number + 1):
        workers.add(WorkerSpec(Role.PREFILL, Address("p", port))).mark_up()
    return workers


def prefill(tokens: int, first: int = 0) -> Work:
    return Work(Role.PREFILL, {"prompt": ids(tokens, first)})


def test_a_long_prompt_weighs_as_much_as_many_short_ones() -> None:
    workers = registry(2, None)
    long = workers.acquire(prefill(1000))
    short = [workers.acquire(prefill(100)) for _ in range(9)]
    assert long.worker not in {lease.worker for lease in short}
    assert long.worker.load == 1000
    long.release()
    assert long.worker.load == 0


def test_decode_weighs_what_it_holds_and_what_it_will_generate() -> None:
    work = Work(Role.DECODE, {"prompt": ids(100), "max_tokens": 20, "n": 2})
    workers = registry(1, None)
    (worker,) = workers
    assert OutstandingTokens().cost(worker, work) == 140


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    workers = registry(3, 1.25)
    work = prefill(1000)
    first = workers.acquire(work)
    first.worker.prefixes.note(work.prompt.chunks)
    first.release()
    again = workers.acquire(prefill(1040))
    assert again.worker is first.worker
    assert again.cost == 1040 - 1000 // CHUNK_TOKENS * CHUNK_TOKENS


def test_one_popular_beginning_is_spread() -> None:
    workers = registry(3, 1.25)
    work = prefill(64_000)
    leases = []
    for _ in range(12):
        lease = workers.acquire(work)
        lease.worker.prefixes.note(work.prompt.chunks)
        leases.append(lease)
    assert sorted(worker.outstanding for worker in workers) == [4, 4, 4]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    step = st.tuples(
        st.sampled_from(["give", "give", "give", "end"]),
        st.integers(1, 40 * CHUNK_TOKENS),
        st.integers(0, 3),
    )
    return draw(st.lists(step, max_size=40))


@given(histories(), st.integers(1, 4), st.sampled_from([1.0, 1.25, 2.0]))
@settings(deadline=None, max_examples=200)
def test_what_is_cached_never_overloads_a_worker(
    history: list[tuple[str, int, int]], number: int, max_load: float
) -> None:
    workers = registry(number, max_load)
    running: list[Lease] = []
    for what, tokens, first in history:
        if what == "end":
            if running:
                running.pop(0).release()
            continue
        work = prefill(tokens, first)
        legs = sum(w.outstanding for w in workers)
        lease = workers.acquire(work)
        lease.worker.prefixes.note(work.prompt.chunks)
        running.append(lease)
        assert lease.worker.outstanding <= math.ceil(max_load * (legs + 1) / number)
    for lease in running:
        lease.release()
    assert [w.load for w in workers] == [0.0] * number


def test_a_lost_worker_is_believed_to_know_nothing() -> None:
    workers = registry(2, 1.25)
    work = prefill(640)
    first = workers.acquire(work).worker
    first.prefixes.note(work.prompt.chunks)
    first.mark_down("gone")
    first.mark_up()
    assert first.prefixes.tokens(work.prompt.chunks) == 0


# ---- in a router


def by(balance: Balance) -> RoutingSettings:
    return RoutingSettings(balance=BalanceSettings(balance))


@pytest.mark.parametrize("mode", list(Mode))
async def test_conversations_stay_together_on_both_sides(
    cluster: Cluster, mode: Mode
) -> None:
    await cluster.start(
        mode,
        [answers(prefill_answer())] * 2,
        [answers()] * 2,
        routing=by(Balance.PREFIX),
    )
    talks: dict[str, list[dict[str, str]]] = {
        name: [{"role": "user", "content": name * 600}] for name in "abcd"
    }
    for _ in range(3):
        for talk in talks.values():
            got = await cluster.post({"messages": talk}, CHAT)
            assert got.status == 200
            talk.append({"role": "assistant", "content": "hi"})
            talk.append({"role": "user", "content": "more"})
    for engines in (cluster.prefill, cluster.decode):
        begun = [
            {seen.body["messages"][0]["content"][0] for seen in engine.seen}
            for engine in engines
        ]
        assert begun[0] | begun[1] == set("abcd")
        assert not begun[0] & begun[1]
        assert [len(engine.seen) for engine in engines] == [6, 6]


async def test_a_long_prompt_keeps_short_ones_away(cluster: Cluster) -> None:
    slow = answers(prefill_answer(), after=0.5)
    await cluster.start(
        "pull", [slow, slow], answers(completion("a")), routing=by(Balance.TOKENS)
    )
    long = asyncio.create_task(cluster.post({"prompt": ids(5000)}))
    await asyncio.wait(
        [asyncio.create_task(engine.request()) for engine in cluster.prefill],
        return_when=asyncio.FIRST_COMPLETED,
    )
    await asyncio.gather(*(cluster.post({"prompt": ids(50)}) for _ in range(4)))
    await long
    assert sorted(len(engine.seen) for engine in cluster.prefill) == [1, 4]
