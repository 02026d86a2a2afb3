# SPDX-License-Identifier: Apache-2.0
"""What else a request may ask for is answered as if the prompt had been computed here.

The prefill engine, asked alone, is the reference: what it hands over it has computed
itself.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors import safe_open

from handoff_client import (
    CHAT,
    COMPLETIONS,
    Body,
    Client,
    Reply,
    assert_clean,
    handoffs,
)
from handoff_engines import ADAPTER, SPEC, EngineRoom
from handoff_workload import words
from pd_launcher import Pair
from tiny_model import as_text, random_prompt, tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

LENGTH = 200
LOGPROB_TOLERANCE = 1e-3
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_seeds = itertools.count()


@pytest_asyncio.fixture
async def featured(room: EngineRoom, client: Client) -> AsyncIterator[Pair]:
    running = room.pair("push", "push-prefill-features", "push-decode-features")
    yield running
    await assert_clean(client, running)


@pytest_asyncio.fixture
async def speculating(room: EngineRoom, client: Client) -> AsyncIterator[Pair]:
    names = "push-prefill-speculating", "push-decode-speculating"
    running = room.pair("push", *names)
    yield running
    await assert_clean(client, running)


@pytest.fixture
def prompt() -> list[int]:
    """One that no engine has seen."""
    return random_prompt(LENGTH, random.Random(f"features {next(_seeds)}"), SPEC)


def _body(prompt: list[int], **more: Any) -> Body:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        **more,
    }


async def _both(
    client: Client, pair: Pair, body: Body, path: str = COMPLETIONS, moved: int = LENGTH
) -> tuple[Any, Any]:
    """The first choices of the pair and of the prefill engine alone."""
    before = len(await handoffs(pair.decode))
    through = await client.post(pair.router, body, path)
    records = (await handoffs(pair.decode))[before:]
    assert [r["outcome"] for r in records] == ["received"], (through, records)
    assert records[0]["tokens"] >= moved - 1
    alone = await client.post(pair.prefill, body, path)
    return _choice(through), _choice(alone)


def _choice(reply: Reply) -> Any:
    assert reply.status == 200, reply
    return reply.body["choices"][0]


async def test_lora(client: Client, featured: Pair, prompt: list[int]) -> None:
    got, wanted = await _both(client, featured, _body(prompt, model=ADAPTER))
    plain = _choice(await client.post(featured.prefill, _body(prompt)))

    assert got["text"] == wanted["text"]
    assert got["text"] != plain["text"]


async def test_logprobs(client: Client, featured: Pair, prompt: list[int]) -> None:
    got, wanted = await _both(client, featured, _body(prompt, logprobs=3))

    assert got["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    for mine, theirs in zip(
        got["logprobs"]["token_logprobs"],
        wanted["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert abs(mine - theirs) < LOGPROB_TOLERANCE


async def test_structured_output(
    client: Client, featured: Pair, prompt: list[int]
) -> None:
    choices = ["w11w12w13", "w21w22w23"]
    body = _body(prompt, structured_outputs={"choice": choices})
    got, wanted = await _both(client, featured, body)

    assert got["text"].replace(" ", "") in choices
    assert got["text"] == wanted["text"]


async def test_chat_with_tools(
    client: Client, featured: Pair, prompt: list[int]
) -> None:
    body: Body = {
        "model": "model",
        "messages": [{"role": "user", "content": as_text(prompt)}],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "max_tokens": 16,
        "temperature": 0,
    }
    got, wanted = await _both(client, featured, body, CHAT)

    assert got["message"] == wanted["message"]
    assert got["finish_reason"] == wanted["finish_reason"]


async def test_prompt_embeddings(
    client: Client, featured: Pair, prompt: list[int]
) -> None:
    body = _body([], prompt_embeds=_embeddings(prompt))
    del body["prompt"]
    got, wanted = await _both(client, featured, body)
    by_ids = await client.post(featured.prefill, _body(prompt))

    # Without ids of the prompt, an answer's text begins without a blank.
    assert got["text"] == wanted["text"]
    assert words(got["text"]) == by_ids.tokens


async def test_prompt_logprobs_are_computed_where_they_are_asked_for(
    client: Client, featured: Pair, prompt: list[int]
) -> None:
    body = _body(prompt, prompt_logprobs=1)
    through = _choice(await client.post(featured.router, body))
    alone = _choice(await client.post(featured.prefill, body))

    assert through["text"] == alone["text"]
    assert len(through["prompt_logprobs"]) == LENGTH


@pytest.mark.full
async def test_speculation(client: Client, speculating: Pair) -> None:
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    before = await client.metrics(speculating.decode)
    for length in (2, 31, 32, 33, 511, 513):
        rng = random.Random(f"speculation {length}")
        prompt = (random_prompt(5, rng, SPEC) * length)[:length]
        body = _body(prompt, max_tokens=32)
        got, wanted = await _both(client, speculating, body, moved=length)
        assert got["text"] == wanted["text"]
    after = await client.metrics(speculating.decode)
    assert after[drafted] > before.get(drafted, 0)


def _embeddings(prompt: list[int]) -> str:
    """The rows of the model's embedding, as the API takes them."""
    path = tiny_model(SPEC) / "model.safetensors"
    with safe_open(path, framework="pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    buffer = io.BytesIO()
    torch.save(table[prompt], buffer)
    return base64.b64encode(buffer.getvalue()).decode()
