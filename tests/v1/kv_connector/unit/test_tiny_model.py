# SPDX-License-Identifier: Apache-2.0
"""The tiny model does what the comparisons of the distributed tests rest on."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_model import (
    FIRST_WORD,
    TinySpec,
    as_text,
    random_prompt,
    tiny_model,
)

ANSWER = 16
BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tiny_model(folder=tmp_path_factory.mktemp("tiny"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.set_num_threads(threads)


def greedy(model: Any, prompt: list[int], swap_block: int | None = None) -> list[int]:
    """The answer of ``ANSWER`` tokens.

    ``swap_block`` puts another block's keys and values in the place of one block
    between prefill and decode.
    """
    tokens: list[int] = []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        if swap_block is not None:
            here = slice(swap_block * BLOCK, (swap_block + 1) * BLOCK)
            for layer in cache.layers:
                for values in (layer.keys, layer.values):
                    values[:, :, here] = values[:, :, -BLOCK:].clone()
        while len(tokens) < ANSWER:
            tokens.append(int(out.logits[0, -1].argmax()))
            last = torch.tensor([[tokens[-1]]])
            out = model(last, past_key_values=cache, use_cache=True)
    return tokens


def test_the_best_logit_leads_far_beyond_rounding(model: Any) -> None:
    rng = random.Random(1)
    prompts = torch.tensor([random_prompt(512, rng) for _ in range(8)])
    with torch.no_grad():
        whole = model(prompts).logits
        first = model(prompts[:, :200], use_cache=True)
        rest = model(prompts[:, 200:], past_key_values=first.past_key_values)
    best = whole.topk(2)
    leads = (best.values[..., 0] - best.values[..., 1]).flatten()
    chunked = torch.cat([first.logits, rest.logits], dim=1).gather(2, best.indices)
    rounding = (chunked[..., 0] - chunked[..., 1]).flatten() - leads

    assert rounding.abs().max() < 1e-4
    assert (leads > 1e-3).double().mean() > 0.998
    assert (leads > 1e-2).double().mean() > 0.98


@pytest.mark.parametrize("length", [4, 33, 200, 1000])
def test_one_early_token_changes_the_answer(model: Any, length: int) -> None:
    rng = random.Random(length)
    changed = 0
    for _ in range(20):
        prompt = random_prompt(length, rng)
        other = list(prompt)
        at = rng.randrange(max(1, length // 4))
        while other[at] == prompt[at]:
            other[at] = random_prompt(1, rng)[0]
        changed += greedy(model, prompt) != greedy(model, other)
    assert changed > 18


@pytest.mark.parametrize("length", [100, 1000])
def test_one_wrong_block_changes_the_answer(model: Any, length: int) -> None:
    rng = random.Random(length)
    changed = 0
    for _ in range(20):
        prompt = random_prompt(length, rng)
        block = rng.randrange(length // BLOCK - 1)
        changed += greedy(model, prompt) != greedy(model, prompt, block)
    assert changed > 18


def test_answers_are_varied_and_never_special(model: Any) -> None:
    rng = random.Random(5)
    answers = [greedy(model, random_prompt(60, rng)) for _ in range(20)]
    assert len({tuple(answer) for answer in answers}) == 20
    assert min(len(set(answer)) for answer in answers) > ANSWER // 2
    assert min(min(answer) for answer in answers) >= FIRST_WORD


def test_text_and_tokens_are_the_same_prompt(tmp_path: Path) -> None:
    directory = tiny_model(folder=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = random_prompt(50, random.Random(2))
    assert tokenizer(as_text(prompt)).input_ids == prompt
    assert tokenizer.decode(prompt) == as_text(prompt)


def test_it_is_kept_and_told_apart_by_its_parameters(tmp_path: Path) -> None:
    first = tiny_model(TinySpec(seed=1), tmp_path)
    written = os.stat(first / "model.safetensors").st_mtime_ns
    assert tiny_model(TinySpec(seed=1), tmp_path) == first
    assert os.stat(first / "model.safetensors").st_mtime_ns == written
    assert tiny_model(TinySpec(seed=2), tmp_path) != first
    names = sorted(path.name for path in tmp_path.iterdir())
    assert all(name.startswith("tiny-llama-") for name in names)
