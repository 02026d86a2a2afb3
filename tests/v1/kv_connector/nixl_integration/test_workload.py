# SPDX-License-Identifier: Apache-2.0
"""The judge of the distributed tests: what it lets pass and what it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from handoff_engines import BLOCK_SIZE, SPEC
from handoff_workload import (
    MAX_PROMPT,
    SERVED_REQUESTS,
    Ask,
    References,
    served,
    words,
)
from tiny_model import SPECIAL_TOKENS, tiny_model

PROMPT = (100, 200, 300)


def _best_two(model: Path) -> tuple[int, int]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = loaded(torch.tensor([PROMPT])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    return first, second


@pytest.fixture
def tied_model(tmp_path: Path) -> tuple[Path, int, int]:
    """The model with two words that are always as likely as each other."""
    first, second = _best_two(tiny_model(SPEC))
    made = tmp_path / "tied"
    shutil.copytree(tiny_model(SPEC), made)
    weights = load_file(made / "model.safetensors")
    weights["lm_head.weight"][second] = weights["lm_head.weight"][first]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made, first, second


def test_the_second_best_answer_is_wrong() -> None:
    first, second = _best_two(tiny_model(SPEC))
    references = References({PROMPT: (first,)})

    assert references.problems([(Ask(PROMPT, 1), (first,))]) == []
    (problem,) = references.problems([(Ask(PROMPT, 1), (second,))])

    assert "at 0 the logits differ by" in problem
    assert references.ties == []


def test_an_answer_of_another_length_is_wrong() -> None:
    references = References({PROMPT: (5, 6, 7)})

    (problem,) = references.problems([(Ask(PROMPT, 3), (5, 6))])

    assert "expected (5, 6, 7)" in problem


def test_a_tie_passes_and_is_counted(
    tied_model: tuple[Path, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    model, first, second = tied_model
    references = References({PROMPT: (first, 7)}, model)

    assert references.problems([(Ask(PROMPT, 2), (second, 9))]) == []

    assert len(references.ties) == 1
    assert "tie:" in capsys.readouterr().out


def test_too_many_ties_fail(tied_model: tuple[Path, int, int]) -> None:
    model, first, second = tied_model
    references = References({PROMPT: (first,)}, model)

    found = references.problems([(Ask(PROMPT, 1), (second,))] * 2)

    assert found == ["2 ties in 2 answers"]


def test_words_are_the_models_own() -> None:
    assert words("w3 w700") == (3, 700)
    for text in (SPECIAL_TOKENS[0], "hello"):
        with pytest.raises(ValueError, match="no word of the model"):
            words(f"w3 {text}")


def test_the_requests_are_of_all_kinds() -> None:
    lengths = {len(ask.prompt) for ask in served()}

    assert len(served()) == SERVED_REQUESTS
    assert {1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, MAX_PROMPT} <= lengths
    assert max(lengths) == MAX_PROMPT
    assert len({ask.prompt for ask in served()}) < SERVED_REQUESTS
    assert len({ask.prompt[:BLOCK_SIZE] for ask in served()}) < SERVED_REQUESTS * 0.9
    assert {ask.stream for ask in served()} == {True, False}
