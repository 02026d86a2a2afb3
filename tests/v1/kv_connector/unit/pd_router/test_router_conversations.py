# SPDX-License-Identifier: Apache-2.0
"""Conversations as clients and operators see them: ids, status, end, bounds."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

import pd_router.multiturn
import pd_router.side_channel
from conversation_backends import (
    PREFILL,
    WHOLE,
    Keeper,
    Talk,
    gated,
    transfer_of,
)
from pd_router.config import Address, ConversationSettings
from pd_router.side_channel import SideChannelClient, Token, UnansweredError
from router_backends import (
    Cluster,
    Engine,
    answers,
    free_port,
    in_turn,
    prefill_answer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import auth
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)

ALICE = {"Authorization": "Bearer alice"}
BOB = {"Authorization": "Bearer bob"}
BOTH = pytest.mark.parametrize("mode", ["push", "pull"])


# ---- ids


@pytest.mark.parametrize(
    "wrong", ["", "a b", "x" * 257, "\u00e4", "a\n", 7, True, ["a"], {"a": 1}]
)
async def test_what_is_no_id_is_refused(talk: Talk, wrong: object) -> None:
    await talk.start("push")
    got = await talk.turn(wrong)
    assert (got.status, got.error["param"]) == (400, "conversation_id")
    assert "1 to 256 printable ASCII characters" in got.error["message"]
    assert talk.cluster.prefill[0].seen == talk.cluster.decode[0].seen == []


async def test_header_and_body_must_agree(talk: Talk) -> None:
    await talk.start("push")
    got = await talk.turn("a", headers={"X-Conversation-Id": "b"})
    assert got.status == 400
    assert "two conversations" in got.error["message"]
    got = await talk.turn(None, headers={"X-Conversation-Id": "x" * 257})
    assert got.status == 400


async def test_an_id_of_null_is_none(talk: Talk) -> None:
    await talk.start("push")
    body = {"prompt": "p", "conversation_id": None}
    assert (await talk.cluster.post(body)).status == 200
    assert talk.decode_leg(0).params["retain"] is False
    assert "conversation_id" not in talk.decode_leg(0).body


@pytest.mark.parametrize("name", ["x" * 256, "a/b", "~!@$&*()_+", "..", "a=b;c,d"])
async def test_unusual_ids_are_ids(talk: Talk, name: str) -> None:
    await talk.start("push")
    await talk.turn(name)
    await talk.turn(None, headers={"X-Conversation-Id": name})
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


# ---- status


async def test_the_status_has_counts_and_places_and_no_contents(talk: Talk) -> None:
    await talk.start("push", decode=[WHOLE, WHOLE], ttl=300.0, max_entries=50)
    await talk.turn("secret-name", headers=ALICE, prompt="secret words")
    await talk.turn("secret-name", headers=ALICE, prompt="secret words")
    await talk.turn("other-secret")
    await talk.cluster.quiet()
    got = await talk.cluster.get("/conversations")
    state = got.json
    places = [str(engine.address) for engine in talk.cluster.decode]
    assert state["conversations"] == 2
    assert (state["max_conversations"], state["ttl_seconds"]) == (50, 300.0)
    assert state["turns_under_way"] == 0
    assert state["by_decode"] == dict.fromkeys(places, 1)
    other, first = state["listed"]
    assert (first["turns"], other["turns"]) == (2, 1)
    assert (first["prompt_tokens"], first["answer_tokens"]) == (3, 7)
    assert 0 <= other["idle_seconds"] <= first["idle_seconds"] <= first["age_seconds"]
    assert 0 <= state["longest_idle_seconds"] <= first["age_seconds"]
    for secret in ("secret", "alice", "Bearer"):
        assert secret not in got.body.decode()
    for seen in talk.cluster.prefill[0].seen:
        assert transfer_of(seen) not in got.body.decode()


async def test_the_same_id_has_another_name_in_another_router(
    talk: Talk,
) -> None:
    await talk.start("push")
    multiturn = talk.cluster.router.multiturn
    assert multiturn is not None
    again = pd_router.multiturn.Multiturn(
        ConversationSettings(), talk.cluster.router.workers, SideChannelClient()
    )
    assert multiturn.key("a", "b") == multiturn.key("a", "b")
    assert multiturn.key("a", "b") != again.key("a", "b")
    # What belongs to the one does not slip into the other.
    assert multiturn.key("a", "bc") != multiturn.key("ab", "c")


async def test_the_list_is_bounded(talk: Talk) -> None:
    await talk.start("push")
    for name in "abc":
        await talk.turn(name)
    for limit, expected in (("0", 0), ("2", 2), ("1000", 3)):
        got = await talk.cluster.get(f"/conversations?limit={limit}")
        assert (got.json["conversations"], len(got.json["listed"])) == (3, expected)
    for wrong in ("1001", "-1", "x", "", "9" * 5000):
        got = await talk.cluster.get(f"/conversations?limit={wrong}")
        assert (got.status, got.error["param"]) == (400, "limit")
        assert len(got.body) < 1000


async def test_logs_do_not_name_conversations(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    await talk.start("push")
    with caplog.at_level(logging.DEBUG, logger="pd_router"):
        for _ in range(2):
            await talk.turn("secret-name", headers=ALICE)
        await talk.delete("secret-name", ALICE)
    lines = [r.getMessage() for r in caplog.records if r.name == "pd_router"]
    first, second = (transfer_of(talk.decode_leg(i)) for i in range(2))
    assert any(first in line and second in line for line in lines)
    assert not any("secret" in line or "alice" in line for line in lines)


# ---- the end of a conversation


@BOTH
async def test_its_caller_can_end_a_conversation(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    await talk.turn("a/b", headers=ALICE)
    for other in (BOB, None):
        got = await talk.delete("a%2Fb", other)
        assert (got.status, got.error["type"]) == (404, "NotFoundError")
    got = await talk.delete("a%2Fb", ALICE)
    assert (got.status, got.json) == (200, {"ended": True, "released": True})
    assert talk.keepers[0].released == [transfer_of(talk.decode_leg(0))]
    assert (await talk.delete("a%2Fb", ALICE)).status == 404
    await talk.turn("a/b", headers=ALICE)
    assert talk.continues(1) is None


async def test_a_wrong_id_cannot_be_ended(talk: Talk) -> None:
    await talk.start("push")
    for name in ("a%20b", "x" * 257, "%C3%A4"):
        assert (await talk.delete(name)).status == 400
    assert (await talk.delete("unknown")).status == 404


@BOTH
async def test_a_turn_under_way_leaves_nothing_of_an_ended_one(
    talk: Talk, mode: str
) -> None:
    gate = asyncio.Event()
    await talk.start(mode, decode=in_turn(WHOLE, gated(WHOLE, gate), WHOLE))
    await talk.turn()
    asking = asyncio.create_task(talk.turn())
    await talk.cluster.decode[0].request(1)
    # Decode lets go of the first turn itself when the second one ends.
    assert (await talk.delete("talk")).json == {"ended": True, "released": False}
    gate.set()
    assert (await asking).status == 200
    await talk.released(0, transfer_of(talk.decode_leg(1)))
    await talk.turn()
    assert talk.continues(2) is None


@BOTH
async def test_an_unreachable_engine_does_not_hold_up_the_end(
    talk: Talk, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_router.side_channel, "ANSWER_SECONDS", 0.2)
    await talk.start(mode)
    await talk.turn()
    [worker] = talk.decode_workers
    nobody = Address("127.0.0.1", free_port())
    worker.spec = replace(worker.spec, report_address=nobody)
    got = await talk.delete("talk")
    assert got.json == {"ended": True, "released": False}
    assert await releases(talk, "failed") == 1
    assert (await talk.delete("talk")).status == 404


async def test_a_silent_engine_holds_up_no_turn(talk: Talk) -> None:
    await talk.start("push", max_entries=1)
    [worker] = talk.decode_workers
    nobody = Address("127.0.0.1", free_port())
    worker.spec = replace(worker.spec, report_address=nobody)
    for name in "abc":
        assert (await talk.turn(name)).status == 200
    multiturn = talk.cluster.router.multiturn
    assert multiturn is not None
    assert len(multiturn._releasing) == 2
    # Stopping does not wait for them either.
    await multiturn.stop()
    assert not multiturn._releasing


async def test_releases_under_way_are_bounded(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_router.multiturn, "MAX_RELEASES_UNDER_WAY", 2)
    monkeypatch.setattr(pd_router.side_channel, "ANSWER_SECONDS", 3.0)
    await talk.start("push", max_entries=1)
    [worker] = talk.decode_workers
    nobody = Address("127.0.0.1", free_port())
    worker.spec = replace(worker.spec, report_address=nobody)
    for name in "abcde":
        await talk.turn(name)
    assert await releases(talk, "skipped") == 2


# ---- bounds


@BOTH
async def test_an_old_conversation_is_forgotten_and_released(
    talk: Talk, mode: str
) -> None:
    await talk.start(mode, ttl=0.2)
    await talk.turn("old")
    await asyncio.sleep(0.25)
    assert (await talk.cluster.get("/conversations")).json["conversations"] == 0
    await talk.released(0, transfer_of(talk.decode_leg(0)))
    await talk.turn("old")
    assert talk.continues(1) is None
    assert await dropped(talk, "expired") == 1
    assert await turns(talk, "miss") == 2


@BOTH
async def test_the_number_of_conversations_is_bounded(talk: Talk, mode: str) -> None:
    await talk.start(mode, max_entries=2)
    for name in ("a", "b", "a", "c"):
        await talk.turn(name)
    state = (await talk.cluster.get("/conversations")).json
    assert state["conversations"] == 2
    await talk.released(0, transfer_of(talk.decode_leg(1)))
    await talk.turn("b")
    assert talk.continues(4) is None
    assert await dropped(talk, "evicted") == 2


# ---- metrics


def reporting(cached: Any, prompt: Any = 100) -> Any:
    """A prefill engine that tells how much of the prompt it did not compute."""
    answer = prefill_answer()
    answer["usage"] = {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return answers(answer)


@BOTH
async def test_hits_and_saved_tokens_are_counted(talk: Talk, mode: str) -> None:
    await talk.start(mode, prefill=in_turn(reporting(33), reporting(64), reporting(96)))
    for _ in range(3):
        await talk.turn()
    await talk.turn(None)
    assert (await turns(talk, "hit"), await turns(talk, "miss")) == (2, 1)
    # What the first turn found in prefill's own cache is not the router's doing.
    assert await number(talk, "pd_router_conversation_saved_tokens_total") == 160
    assert await number(talk, "pd_router_conversation_prompt_tokens_total") == 200
    assert await number(talk, "pd_router_conversations") == 1


@pytest.mark.parametrize(
    ("cached", "prompt", "saved"),
    [
        (None, 100, 0),
        ("64", 100, 0),
        (True, 100, 0),
        (-1, 100, 0),
        (1.5, 100, 0),
        ([], 100, 0),
        (2**31, 100, 0),
        (7, None, 0),
        (500, 100, 100),
    ],
)
async def test_reports_that_cannot_be_are_not_counted(
    talk: Talk, cached: Any, prompt: Any, saved: int
) -> None:
    await talk.start("pull", prefill=in_turn(PREFILL, reporting(cached, prompt)))
    for _ in range(2):
        assert (await talk.turn()).status == 200
    assert await number(talk, "pd_router_conversation_saved_tokens_total") == saved


@pytest.mark.parametrize(
    "answer", [[1], {"usage": 7}, {"usage": {"prompt_tokens_details": [1]}}, "x"]
)
async def test_answers_of_another_form_are_turns_too(talk: Talk, answer: Any) -> None:
    await talk.start("push", prefill=answers(answer), decode=answers(answer))
    for _ in range(2):
        assert (await talk.turn()).status == 200
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


async def test_only_routers_with_conversations_count_them(cluster: Cluster) -> None:
    await cluster.start("push", PREFILL, WHOLE)
    text = (await cluster.get("/metrics")).body.decode()
    assert "pd_router_requests" in text
    assert "conversation" not in text


# ---- workers at run time


async def test_a_decode_engine_is_added_with_its_side_channel(talk: Talk) -> None:
    await talk.start("push", admin_key="k")
    extra = Engine(WHOLE)
    talk.cluster.decode.append(extra)
    await extra.start()
    worker = {"role": "decode", "address": str(extra.address)}

    async def add(**more: str) -> tuple[int, str]:
        async with talk.cluster.client.post(
            "/admin/workers", json={**worker, **more}, headers={"X-Admin-Key": "k"}
        ) as response:
            return response.status, await response.text()

    status, text = await add()
    assert status == 400
    assert "side_channel" in text
    status, _ = await add(side_channel="127.0.0.1:5999")
    assert status == 201
    talk.decode_workers[0].mark_down("for the test")
    for _ in range(2):
        assert (await talk.turn()).status == 200
    assert talk.prefill_leg(1).params["remote_port"] == 5999


async def test_a_removed_decode_engine_is_not_asked(talk: Talk) -> None:
    await talk.start("push", decode=[WHOLE, WHOLE])
    await talk.turn()
    worker = talk.decode_workers[0]
    talk.cluster.router.workers.remove(worker.role, worker.address)
    assert (await talk.turn()).status == 200
    assert talk.continues(1) is None
    assert await releases(talk, "skipped") == 1


# ---- the side channel's release


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
async def test_the_server_understands_a_release(secret: bytes | None) -> None:
    address = Address("127.0.0.1", free_port())
    keeper = Keeper()
    server = SideChannelServer(
        (address.host, address.port), [], keeper, auth.Token(secret) if secret else None
    )
    client = SideChannelClient(Token(secret) if secret else None)
    try:
        await client.release(address, "t-1")
        assert keeper.released == ["t-1"]
        with pytest.raises(UnansweredError, match="not a side-channel request"):
            await client.release(address, "x" * 513)
    finally:
        client.close()
        server.close()


async def number(talk: Talk, name: str, **labels: str) -> float:
    await talk.settled()
    return await talk.cluster.metric(name, mode=mode_of(talk), **labels)


async def turns(talk: Talk, result: str) -> float:
    return await number(talk, "pd_router_conversation_turns_total", result=result)


async def dropped(talk: Talk, reason: str) -> float:
    return await number(talk, "pd_router_conversations_dropped_total", reason=reason)


async def releases(talk: Talk, result: str) -> float:
    return await number(talk, "pd_router_conversation_releases_total", result=result)


def mode_of(talk: Talk) -> str:
    return str(talk.cluster.router.config.mode)
