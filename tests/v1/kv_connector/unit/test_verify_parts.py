# SPDX-License-Identifier: Apache-2.0
"""Parts of a verification: comparing answers, making prompts, writing the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import verify_pd
from verify_answers import Answer, Kind, compare
from verify_prompts import Prompt, Tokens, make_prompts
from verify_report import MAX_DETAILS, render
from verify_result import Report, Status

MARGIN = 0.1


def answer(*places: tuple[int, float, int, float]) -> Answer:
    """Of each place: the token, its logprob, the next likeliest and its logprob."""
    return Answer(
        tuple(place[0] for place in places),
        tuple(place[1] for place in places),
        tuple({a: p, b: q} for a, p, b, q in places),
    )


FIRST = (1, -0.5, 2, -3.0)
REFERENCE = answer(FIRST, (3, -0.70, 4, -0.75), FIRST)


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (REFERENCE, Kind.EQUAL),
        (answer(FIRST, (3, -0.72, 4, -0.73), FIRST), Kind.EQUAL),
        # The two nearly equal ones have changed places; what follows is another text.
        (answer(FIRST, (4, -0.72, 3, -0.73), (9, -5.0, 8, -6.0)), Kind.TIE),
        # Nearly equal in one answer, and not in the other.
        (answer(FIRST, (4, -0.40, 3, -1.20), FIRST), Kind.DIFFERENT),
        # A tie again, but of probabilities that are not those of the reference.
        (answer(FIRST, (4, -1.50, 3, -1.51), FIRST), Kind.DIFFERENT),
        # All was off before.
        (answer((1, -0.9, 2, -3.0), (4, -0.72, 3, -0.73), FIRST), Kind.DIFFERENT),
        (answer(FIRST, (5, -0.70, 3, -0.72), FIRST), Kind.DIFFERENT),
        (answer((1, -0.7, 2, -3.0), *((3, -0.70, 4, -0.75), FIRST)), Kind.OFF),
        (answer((1, float("nan"), 2, -3.0), (3, -0.70, 4, -0.75), FIRST), Kind.OFF),
        (answer(FIRST), Kind.DIFFERENT),
        (Answer((1, 3, 1)), Kind.EQUAL),
        (Answer((1, 4, 1)), Kind.DIFFERENT),
    ],
)
def test_answers_are_compared_by_tokens_and_probabilities(
    got: Answer, kind: Kind
) -> None:
    verdict = compare(REFERENCE, got, MARGIN)

    assert verdict.kind is kind
    assert bool(verdict.text) is (kind is not Kind.EQUAL)


async def words(text: str) -> Tokens:
    return (7, *(sum(word.encode()) for word in text.split()))


async def unknown_words(text: str) -> Tokens:
    return (0,) * len(text.split())


async def nobody(text: str) -> None:
    return None


async def test_prompts_lie_at_and_across_block_edges() -> None:
    prompts = await make_prompts(1, 32, 1000, words)

    lengths = [len(prompt.tokens) for prompt in prompts]
    assert {31, 32, 33, 64, 95, 97} <= set(lengths)
    assert max(lengths) > 900
    # The model's own first token is there, for the texts are tokenized whole.
    assert all(prompt.tokens[0] == 7 for prompt in prompts)


async def test_prompts_follow_from_their_seed() -> None:
    first, again, other = [await make_prompts(s, 32, 1000, words) for s in (1, 1, 2)]

    assert first == again
    assert _texts(first).isdisjoint(_texts(other))


async def test_repeated_prefixes_are_the_only_ones() -> None:
    prompts = await make_prompts(1, 32, 1000, nobody)

    beginnings: dict[Tokens, list[str]] = {}
    for prompt in prompts:
        beginnings.setdefault(prompt.tokens[:7], []).append(prompt.kind)
    shared = [kinds for kinds in beginnings.values() if len(kinds) > 1]
    assert shared == [["repeated prefix"] * 3]


async def test_ids_replace_words_that_a_tokenizer_does_not_know() -> None:
    prompts = await make_prompts(1, 32, 1000, unknown_words)

    tokens = {token for prompt in prompts for token in prompt.tokens}
    assert len(tokens) > 500
    assert min(tokens) >= 100


async def test_short_contexts_leave_long_prompts_out() -> None:
    prompts = await make_prompts(1, 32, 100, nobody)

    assert max(len(prompt.tokens) for prompt in prompts) <= 100


def test_page_says_what_to_do() -> None:
    report = Report(title="It")
    report.add("first", [], "as it should be", "never shown", ["worth a note"])
    report.add("second", ["it | broke", *map(str, range(40))], "fine", "Mend it.")
    report.unknown("third", "nobody tells", "Ask somebody.")

    page = render(report)

    assert page.startswith("# It: FAIL\n")
    assert "| PASS        | first  | as it should be |" in page
    assert r"| FAIL        | second | it \| broke |" in page
    assert "Mend it." in page
    assert "Ask somebody." in page
    assert "never shown" not in page
    assert "- first: worth a note" in page
    assert f"and {40 - MAX_DETAILS} more" in page


@pytest.mark.parametrize(
    ("statuses", "status", "code"),
    [
        ([Status.PASS, Status.PASS], Status.PASS, 0),
        ([Status.PASS, Status.UNKNOWN], Status.UNKNOWN, 2),
        ([Status.UNKNOWN, Status.FAIL, Status.PASS], Status.FAIL, 1),
        ([], Status.UNKNOWN, 2),
    ],
)
def test_worst_check_decides(statuses: list[Status], status: Status, code: int) -> None:
    report = Report()
    for number, one in enumerate(statuses):
        if one is Status.UNKNOWN:
            report.unknown(str(number), "why")
        else:
            problems = ["broke"] if one is Status.FAIL else []
            report.add(str(number), problems, "fine", "")

    assert (report.status, report.exit_status) == (status, code)


def test_no_engine_is_loaded() -> None:
    folder = Path(verify_pd.__file__).parent
    code = (
        "import sys, verify_pd; "
        "found = {'vllm', 'torch', 'numpy', 'nixl'} & set(sys.modules); "
        "sys.exit(str(found) if found else 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def _texts(prompts: list[Prompt]) -> set[Tokens]:
    return {prompt.tokens for prompt in prompts}
