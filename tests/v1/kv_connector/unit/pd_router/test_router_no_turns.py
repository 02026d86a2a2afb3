# SPDX-License-Identifier: Apache-2.0
"""Requests that belong to a conversation and are not kept as its turns."""

import pytest

from conversation_backends import PREFILL, WHOLE, Talk, transfer_of
from router_backends import Cluster, answers, completion

BOTH = pytest.mark.parametrize("mode", ["push", "pull"])


@BOTH
async def test_several_answers_are_not_kept(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    await talk.turn()
    await talk.turn(n=2)
    await talk.turn()
    first = transfer_of(talk.decode_leg(0))
    assert [talk.continues(i) for i in range(3)] == [None, first, first]
    several = talk.decode_leg(1).params
    assert several["retain"] is False
    assert "release_transfer_id" not in several
    assert talk.decode_leg(2).params["release_transfer_id"] == first


@BOTH
async def test_lists_of_prompts_are_no_turns(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    await talk.turn()
    assert (await talk.turn(prompt=["a", "b"])).status == 200
    for seen in talk.cluster.prefill[0].seen[1:]:
        assert "retained_transfer_id" not in seen.params
    for seen in talk.cluster.decode[0].seen[1:]:
        assert seen.params["retain"] is False
        assert "conversation_id" not in seen.body
    # A list of one is a prompt.
    await talk.turn(prompt=["a"])
    assert talk.continues(3) == transfer_of(talk.decode_leg(0))


async def test_a_prompt_that_decode_computes_alone_changes_nothing(talk: Talk) -> None:
    await talk.start("push")
    await talk.turn()
    await talk.turn(echo=True, logprobs=1)
    assert "kv_transfer_params" not in talk.decode_leg(1).body
    assert "conversation_id" not in talk.decode_leg(1).body
    await talk.turn()
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


async def test_a_turn_without_a_handoff_is_not_kept(talk: Talk) -> None:
    """Prefill has no connector: decode knows of no name to keep it under."""
    await talk.start("pull", prefill=answers(completion("x")))
    await talk.turn()
    await talk.turn()
    assert talk.continues(1) is None
    assert (await talk.cluster.get("/conversations")).json["conversations"] == 0


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_one_turn_router_knows_no_conversations(
    cluster: Cluster, mode: str
) -> None:
    await cluster.start(mode, PREFILL, WHOLE)
    body = {"prompt": "p", "conversation_id": "talk"}
    for _ in range(2):
        assert (await cluster.post(body)).status == 200
    for seen in (*cluster.prefill[0].seen, *cluster.decode[0].seen):
        assert seen.body["conversation_id"] == "talk"
        assert "retained_transfer_id" not in seen.params
        assert "retain" not in seen.params
    assert (await cluster.get("/conversations")).status == 404
