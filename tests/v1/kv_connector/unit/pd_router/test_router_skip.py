# SPDX-License-Identifier: Apache-2.0
"""Prompts that decode computes itself because a prefill leg is not worth it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_router.routing import Balance, BalanceSettings, RoutingSettings
from router_backends import CHAT, Cluster, answers, in_turn, prefill_answer

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("mode", ["push", "pull"])]

SKIPPING = RoutingSettings(skip_below=200)
WORKS = answers(prefill_answer())
COUNT = "pd_router_local_prefills_total"


def prompt(tokens: int, first: int = 0) -> dict[str, Any]:
    return {"prompt": [first + place % 5 for place in range(tokens)]}


async def test_a_short_prompt_is_left_to_decode(cluster: Cluster, mode: str) -> None:
    await cluster.start(mode, WORKS, answers(), routing=SKIPPING)
    assert (await cluster.post(prompt(199))).status == 200
    assert cluster.prefill[0].seen == []
    assert cluster.decode[0].seen[0].body == prompt(199)
    assert (await cluster.post(prompt(200, first=9))).status == 200
    assert len(cluster.prefill[0].seen) == 1
    assert "kv_transfer_params" in cluster.decode[0].seen[1].body
    assert await cluster.metric(COUNT, reason="short_prompt") == 1
    assert await cluster.metric(COUNT) == 1
    await cluster.quiet()


async def test_what_decode_has_been_given_is_not_prefilled_again(
    cluster: Cluster, mode: str
) -> None:
    await cluster.start(mode, WORKS, answers(), routing=SKIPPING)
    talk = [{"role": "user", "content": "four" * 1000}]
    await cluster.post({"messages": talk}, CHAT)
    talk += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]
    await cluster.post({"messages": talk}, CHAT)
    assert len(cluster.prefill[0].seen) == 1
    assert await cluster.metric(COUNT, reason="cached_at_decode") == 1
    # An edited history is another prompt.
    talk[0] = {"role": "user", "content": "five" * 1000}
    await cluster.post({"messages": talk}, CHAT)
    assert len(cluster.prefill[0].seen) == 2
    # What remains is long.
    await cluster.post({"messages": [*talk, {"content": "more" * 300}]}, CHAT)
    assert len(cluster.prefill[0].seen) == 3
    assert await cluster.metric(COUNT) == 1


async def test_another_decode_engine_has_not_got_it(
    cluster: Cluster, mode: str
) -> None:
    await cluster.start(mode, WORKS, [answers(), answers()], routing=SKIPPING)
    for _ in range(3):
        await cluster.post(prompt(1000))
    # They take turns, so the second time is the other one's first.
    assert len(cluster.prefill[0].seen) == 2
    assert [len(engine.seen) for engine in cluster.decode] == [2, 1]


async def test_with_prefix_balance_the_one_that_has_it_is_chosen(
    cluster: Cluster, mode: str
) -> None:
    routing = RoutingSettings(balance=BalanceSettings(Balance.PREFIX), skip_below=200)
    await cluster.start(mode, WORKS, [answers(), answers()], routing=routing)
    for _ in range(3):
        await cluster.post(prompt(1000))
    assert len(cluster.prefill[0].seen) == 1
    assert sorted(len(engine.seen) for engine in cluster.decode) == [0, 3]


async def test_what_has_failed_at_decode_is_not_believed_to_be_there(
    cluster: Cluster, mode: str
) -> None:
    failing = answers({"error": {"message": "x"}}, status=500)
    await cluster.start(mode, WORKS, in_turn(failing, answers()), routing=SKIPPING)
    statuses = [(await cluster.post(prompt(1000))).status for _ in range(3)]
    assert statuses == [503, 200, 200]
    assert len(cluster.prefill[0].seen) == 2


async def test_a_skipped_leg_needs_no_prefill_engine(
    cluster: Cluster, mode: str
) -> None:
    await cluster.start(mode, WORKS, answers(), routing=SKIPPING)
    next(w for w in cluster.router.workers if w.role == "prefill").mark_down("gone")
    assert (await cluster.post(prompt(10))).status == 200
    assert (await cluster.post(prompt(1000))).status == 503


async def test_nothing_is_skipped_by_default(cluster: Cluster, mode: str) -> None:
    await cluster.start(mode, WORKS, answers())
    for _ in range(2):
        await cluster.post(prompt(2))
    assert len(cluster.prefill[0].seen) == 2
