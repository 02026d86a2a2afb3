# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation: what the engines are told, and where turns go."""

import asyncio
from typing import Any

import pytest

from conversation_backends import (
    PREFILL,
    STREAM,
    WHOLE,
    Talk,
    gated,
    transfer_of,
    until,
)
from pd_router.routing import RoutingSettings
from router_backends import (
    CHAT,
    DONE,
    ERROR,
    FAST,
    answers,
    hangs,
    in_turn,
    prefill_answer,
    streams,
    token,
)

BOTH = pytest.mark.parametrize("mode", ["push", "pull"])
ANY = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@BOTH
@ANY
async def test_later_turns_go_on_from_what_decode_keeps(
    talk: Talk, mode: str, stream: bool
) -> None:
    await talk.start(mode, decode=STREAM if stream else WHOLE)
    for _ in range(3):
        assert (await talk.turn(stream=stream)).status == 200
    names = [transfer_of(talk.decode_leg(i)) for i in range(3)]
    assert [transfer_of(talk.prefill_leg(i)) for i in range(3)] == names
    assert len(set(names)) == 3

    first, *later = (talk.prefill_leg(i).params for i in range(3))
    assert first == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": names[0],
        "num_receivers": 1,
    }
    at = talk.addresses[0]
    where = {"remote_host": at.host, "remote_port": at.port}
    for params, name, former in zip(later, names[1:], names, strict=False):
        told = {**first, **where, "transfer_id": name, "retained_transfer_id": former}
        assert params == told

    legs = [talk.decode_leg(i).params for i in range(3)]
    released = [leg.get("release_transfer_id") for leg in legs]
    assert released == [None, *names[:2]]
    assert not any("retain" in leg for leg in legs)
    # Prefill's own address, not that of the decode engine.
    assert {leg["remote_port"] for leg in legs} == {5600}
    # Decode has been told with each leg.
    await talk.released(0)


@BOTH
async def test_the_id_does_not_reach_the_engines(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    in_header = {"X-Conversation-Id": "talk"}
    await talk.turn("talk")
    await talk.turn(None, headers=in_header)
    await talk.turn("talk", headers=in_header)
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))
    assert talk.continues(2) == transfer_of(talk.decode_leg(1))
    for engine in (*talk.cluster.prefill, *talk.cluster.decode):
        for seen in engine.seen:
            assert "conversation_id" not in seen.body
            assert "x-conversation-id" not in seen.headers
            assert seen.body["prompt"] == "p"


@BOTH
async def test_chats_are_continued_too(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        body = {"messages": messages, "conversation_id": "talk"}
        assert (await talk.cluster.post(body, CHAT)).status == 200
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


@BOTH
async def test_without_an_id_nothing_is_kept_or_continued(
    talk: Talk, mode: str
) -> None:
    await talk.start(mode)
    for _ in range(2):
        assert (await talk.turn(None)).status == 200
    for i in range(2):
        assert talk.continues(i) is None
        leg = talk.decode_leg(i).params
        assert leg["retain"] is False
        assert "release_transfer_id" not in leg
    assert (await talk.cluster.get("/conversations")).json["conversations"] == 0


@BOTH
async def test_conversations_and_callers_do_not_mix(talk: Talk, mode: str) -> None:
    await talk.start(mode)
    callers: list[dict[str, str] | None]
    callers = [None, {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}]
    for headers in callers:
        for name in ("x", "y"):
            await talk.turn(name, headers=headers)
    assert [talk.continues(i) for i in range(6)] == [None] * 6
    for headers in callers:
        for name in ("x", "y"):
            await talk.turn(name, headers=headers)
    firsts = [transfer_of(talk.decode_leg(i)) for i in range(6)]
    assert [talk.continues(i) for i in range(6, 12)] == firsts
    # The engines still see whose request it is.
    assert talk.decode_leg(2).headers["authorization"] == "Bearer a"


@BOTH
async def test_a_turn_that_follows_the_last_event_at_once_meets_it(
    talk: Talk, mode: str
) -> None:
    """The connection of the first answer is still open then."""
    lingering = streams(token("a"), DONE, end="hang")
    await talk.start(mode, decode=in_turn(lingering, STREAM))
    body = {"prompt": "p", "stream": True, "conversation_id": "talk"}
    async with talk.cluster.client.post("/v1/completions", json=body) as response:
        await response.content.readuntil(DONE.strip())
        await talk.turn(stream=True)
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


@BOTH
async def test_a_whole_answer_is_noted_before_the_client_has_it(
    talk: Talk, mode: str
) -> None:
    # In push the first prefill leg is still running then.
    late = in_turn(answers(prefill_answer(), after=0.3), PREFILL)
    await talk.start(mode, prefill=late)
    await talk.turn()
    await talk.turn()
    assert talk.continues(1) == transfer_of(talk.decode_leg(0))


@BOTH
@pytest.mark.parametrize(
    "broken",
    [
        answers({"error": {"message": "x"}}, status=500),
        answers({"error": {"message": "x"}}, status=400),
        streams(ERROR),
        streams(token("a"), ERROR, gap=0.02),
        streams(token("a"), gap=0.02),
        streams(token("a"), end="abort"),
    ],
    ids=["500", "400", "error-first", "error-later", "cut", "abort"],
)
async def test_a_failed_turn_leaves_the_former_one(
    talk: Talk, mode: str, broken: Any
) -> None:
    await talk.start(mode, decode=in_turn(STREAM, broken, STREAM))
    for _ in range(3):
        await talk.turn(stream=True)
    first = transfer_of(talk.decode_leg(0))
    assert [talk.continues(i) for i in (1, 2)] == [first] * 2
    legs = [talk.decode_leg(i).params for i in (1, 2)]
    assert [leg["release_transfer_id"] for leg in legs] == [first] * 2
    await talk.released(0)


@BOTH
async def test_a_client_that_leaves_leaves_the_former_turn(
    talk: Talk, mode: str
) -> None:
    endless = streams(token("a"), end="hang")
    await talk.start(mode, decode=in_turn(STREAM, endless, STREAM))
    await talk.turn(stream=True)
    leaving = asyncio.create_task(talk.turn(stream=True))
    seen = await talk.cluster.decode[0].request(1)
    leaving.cancel()
    await asyncio.wait_for(seen.disconnected.wait(), 10)
    await talk.cluster.quiet()
    await talk.turn(stream=True)
    assert talk.continues(2) == transfer_of(talk.decode_leg(0))


@BOTH
async def test_a_failed_prefill_leaves_the_former_turn(talk: Talk, mode: str) -> None:
    broken = answers({"error": {"message": "x"}}, status=500)
    decode = in_turn(WHOLE, hangs(), WHOLE) if mode == "push" else WHOLE
    await talk.start(mode, prefill=in_turn(PREFILL, broken, PREFILL), decode=decode)
    assert [(await talk.turn()).status for _ in range(3)] == [200, 503, 200]
    first = transfer_of(talk.decode_leg(0))
    assert [talk.continues(i) for i in (1, 2)] == [first] * 2


@BOTH
async def test_a_retry_goes_on_from_the_same_turn(talk: Talk, mode: str) -> None:
    await talk.start(mode, prefill=[PREFILL, PREFILL])
    await talk.turn()
    used = 0 if talk.cluster.prefill[0].seen else 1
    # The next prefill leg goes to the other one, which is dead by then.
    await talk.cluster.prefill[1 - used].stop()
    assert (await talk.turn()).status == 200
    first = transfer_of(talk.decode_leg(0))
    assert talk.continues(1, used) == first
    assert talk.decode_leg(1).params["release_transfer_id"] == first
    assert await talk.cluster.metric("pd_router_retries_total") == 1
    assert await turns(talk, "hit") == 1


# ---- several decode engines


@BOTH
async def test_a_conversation_stays_with_its_decode_engine(
    talk: Talk, mode: str
) -> None:
    await talk.start(mode, decode=[WHOLE] * 3)
    for name in ("x", "y", "z"):
        await talk.turn(name)
    for _ in range(3):
        for name in ("z", "y", "x"):
            await talk.turn(name)
    assert [len(engine.seen) for engine in talk.cluster.decode] == [4, 4, 4]
    assert sum(map(len, (keeper.released for keeper in talk.keepers))) == 0


@BOTH
async def test_any_prefill_engine_is_told(talk: Talk, mode: str) -> None:
    await talk.start(mode, prefill=[PREFILL, PREFILL])
    await talk.turn()
    await talk.turn()
    assert [len(engine.seen) for engine in talk.cluster.prefill] == [1, 1]
    told = {talk.continues(0, engine) for engine in range(2)}
    assert told == {None, transfer_of(talk.decode_leg(0))}


@BOTH
async def test_an_overloaded_decode_engine_is_left(talk: Talk, mode: str) -> None:
    gate = asyncio.Event()
    busy = gated(WHOLE, gate)
    await talk.start(mode, decode=[in_turn(WHOLE, busy), WHOLE], sticky_margin=1)
    await talk.turn()
    own, other = talk.decode_workers
    first = transfer_of(talk.decode_leg(0))

    # Two more than the other one runs: one over the margin.
    other.mark_down("for the test")
    waiting = [asyncio.create_task(talk.turn(None)) for _ in range(2)]
    await until(lambda: own.outstanding == 2)
    other.mark_up()
    assert (await talk.turn()).status == 200

    moved = talk.decode_leg(0, 1)
    prefill = talk.cluster.prefill[0].seen[-1].params
    assert prefill["retained_transfer_id"] == first
    assert prefill["remote_port"] == talk.addresses[0].port
    assert "release_transfer_id" not in moved.params
    gate.set()
    await asyncio.gather(*waiting)
    await talk.released(0, first)
    await talk.released(1)
    assert await moves(talk, "overloaded") == 1

    # It is at home there now.
    await talk.turn()
    told = talk.decode_leg(1, 1).params["release_transfer_id"]
    assert told == transfer_of(moved)


@BOTH
async def test_within_the_margin_it_stays(talk: Talk, mode: str) -> None:
    gate = asyncio.Event()
    script = in_turn(WHOLE, gated(WHOLE, gate), WHOLE)
    await talk.start(mode, decode=[script, WHOLE], sticky_margin=1)
    await talk.turn()
    own, other = talk.decode_workers
    other.mark_down("for the test")
    waiting = asyncio.create_task(talk.turn(None))
    await until(lambda: own.outstanding == 1)
    other.mark_up()
    await talk.turn()
    assert len(talk.cluster.decode[0].seen) == 3
    gate.set()
    await waiting


@BOTH
async def test_an_unhealthy_decode_engine_is_left_and_not_asked(
    talk: Talk, mode: str
) -> None:
    await talk.start(mode, decode=[WHOLE, WHOLE])
    await talk.turn()
    talk.decode_workers[0].mark_down("for the test")
    assert (await talk.turn()).status == 200
    assert talk.continues(1) is None
    assert len(talk.cluster.decode[1].seen) == 1
    await talk.released(0)
    assert await moves(talk, "unavailable") == 1
    assert await turns(talk, "miss") == 2
    metric = "pd_router_conversation_releases_total"
    assert await talk.cluster.metric(metric, result="skipped") == 1
    await talk.turn()
    assert talk.continues(2) == transfer_of(talk.decode_leg(0, 1))


async def test_a_decode_engine_found_dead_is_left_behind(talk: Talk) -> None:
    await talk.start("push", decode=[WHOLE, WHOLE])
    await talk.turn()
    await talk.cluster.decode[0].stop()
    assert (await talk.turn()).status == 200
    assert len(talk.cluster.decode[1].seen) == 1
    # The prefill leg goes on; it has been told of the dead one, and will compute.
    assert len(talk.cluster.prefill[0].seen) == 2
    await talk.turn()
    assert talk.continues(2) == transfer_of(talk.decode_leg(0, 1))


async def test_a_turn_that_another_engine_answers_is_continued_there(
    talk: Talk,
) -> None:
    slow = in_turn(STREAM, hangs())
    await talk.start(
        "push", decode=[slow, STREAM], routing=RoutingSettings(rebind_after=0.05)
    )
    await talk.turn(stream=True)
    first = transfer_of(talk.decode_leg(0, 0))
    # Load that only the first one has, or it would not be left.
    talk.decode_workers[0].outstanding += 2
    assert (await talk.turn(stream=True)).status == 200
    second = transfer_of(talk.decode_leg(0, 1))
    assert transfer_of(talk.decode_leg(1, 0)) == second
    # The first engine lets go at a normal end only, which it has not come to.
    assert talk.decode_leg(1, 0).params["release_transfer_id"] == first
    talk.decode_workers[0].outstanding -= 2
    await talk.released(0, first)
    await talk.turn(stream=True)
    assert talk.continues(2) == second


# ---- turns at the same time


@BOTH
async def test_two_turns_at_once_do_not_mix(talk: Talk, mode: str) -> None:
    """Nothing is released that the other one goes on from; the last one wins."""
    gates = [asyncio.Event(), asyncio.Event()]
    scripts = [gated(WHOLE, gate) for gate in gates]
    await talk.start(mode, decode=in_turn(WHOLE, *scripts, WHOLE))
    await talk.turn()
    base = transfer_of(talk.decode_leg(0))
    running = []
    for i in (1, 2):
        running.append(asyncio.create_task(talk.turn()))
        await talk.cluster.decode[0].request(i)
    assert [talk.continues(i) for i in (1, 2)] == [base, base]
    one, two = (talk.decode_leg(i) for i in (1, 2))
    # Alone when it began; the second one never was.
    assert one.params["release_transfer_id"] == base
    assert "release_transfer_id" not in two.params

    gates[1].set()
    await running[1]
    await asyncio.sleep(0.05)
    assert talk.keepers[0].released == []
    gates[0].set()
    await running[0]
    await talk.released(0, transfer_of(two))
    await talk.turn()
    assert talk.continues(3) == transfer_of(one)


async def test_nobody_promises_what_two_turns_go_on_from(talk: Talk) -> None:
    gate = asyncio.Event()
    prefill = in_turn(PREFILL, *[gated(PREFILL, gate)] * 2, PREFILL)
    held = asyncio.Event()
    await talk.start("pull", prefill=prefill, decode=in_turn(WHOLE, gated(WHOLE, held)))
    await talk.turn()
    base = transfer_of(talk.decode_leg(0))
    running = [asyncio.create_task(talk.turn()) for _ in range(2)]
    await talk.cluster.prefill[0].request(2)
    gate.set()
    await talk.cluster.decode[0].request(2)
    assert [talk.continues(i) for i in (1, 2)] == [base, base]
    for i in (1, 2):
        assert "release_transfer_id" not in talk.decode_leg(i).params
    assert talk.keepers[0].released == []
    held.set()
    await asyncio.gather(*running)
    # One of the two is continued; what both began from is of no use any more.
    await talk.settled()
    released = talk.keepers[0].released
    await talk.turn()
    last = talk.continues(3)
    both = {transfer_of(talk.decode_leg(i)) for i in (1, 2)}
    assert last in both
    assert sorted(released) == sorted({base, *both} - {last})


async def test_a_failed_rival_changes_nothing(talk: Talk) -> None:
    gate = asyncio.Event()
    broken = answers({"error": {"message": "x"}}, status=500)
    scripts = (WHOLE, gated(broken, gate), WHOLE)
    await talk.start("push", decode=in_turn(*scripts))
    await talk.turn()
    failing = asyncio.create_task(talk.turn())
    await talk.cluster.decode[0].request(1)
    await talk.turn()
    base, last = (transfer_of(talk.decode_leg(i)) for i in (0, 2))
    assert talk.decode_leg(1).params["release_transfer_id"] == base
    await asyncio.sleep(0.05)
    assert talk.keepers[0].released == []
    gate.set()
    assert (await failing).status == 503
    await talk.released(0, base)
    await talk.turn()
    assert talk.continues(3) == last


async def test_a_wait_that_runs_out_leaves_the_former_turn(talk: Talk) -> None:
    limits = FAST.__class__(connect=2, prefill=9, first_event=0.3, idle=0.2, health=2)
    await talk.start("push", decode=in_turn(WHOLE, hangs(), WHOLE), timeouts=limits)
    await talk.turn()
    assert (await talk.turn()).status == 504
    await talk.turn()
    assert talk.continues(2) == transfer_of(talk.decode_leg(0))
    await talk.released(0)


async def turns(talk: Talk, result: str) -> float:
    return await talk.cluster.metric(
        "pd_router_conversation_turns_total", result=result
    )


async def moves(talk: Talk, reason: str) -> float:
    return await talk.cluster.metric(
        "pd_router_conversation_moves_total", reason=reason
    )
