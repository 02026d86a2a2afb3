# SPDX-License-Identifier: Apache-2.0
"""What a router owes that lets P read back what D keeps of a conversation."""

from __future__ import annotations

from typing import Any

from router_contract.bench import Bench, Got
from router_contract.checks import both, chat
from router_contract.engines import CHAT, Leg, answer_text
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    EarlierTurn,
    PrefillParams,
)

Messages = list[dict[str, str]]


async def _turn(
    bench: Bench, conversation: str, messages: Messages, *, key: str = "", **more: Any
) -> tuple[Leg, Leg]:
    """One turn; its messages are the conversation so far."""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    body = {"messages": messages, "conversation_id": conversation, **more}
    got = await bench.post(body, CHAT, headers)
    assert _text(got) == answer_text(messages), got
    legs = both(bench)
    bench.prefill.legs.clear()
    bench.decode.legs.clear()
    return legs


def _text(got: Got) -> str:
    stream = got.headers.get("Content-Type", "").startswith("text/event-stream")
    return got.streamed[0] if stream else got.texts[0]


def _next(messages: Messages, text: str) -> Messages:
    answer = {"role": "assistant", "content": answer_text(messages)}
    return [*messages, answer, {"role": "user", "content": text}]


def _earlier(leg: Leg) -> EarlierTurn | None:
    assert isinstance(leg.params, PrefillParams)
    assert not leg.params.problem, leg.params.problem
    return leg.params.earlier


async def _check(bench: Bench, conversation: str, **more: Any) -> None:
    messages = chat(conversation)
    first, served = await _turn(bench, conversation, messages, **more)
    assert _earlier(first) is None, "the first turn has none before it"
    for number in range(2):
        assert isinstance(served.params, DecodeParams)
        assert served.params.retain, "D was told not to keep the turn"
        messages = _next(messages, f"turn {number}")
        first, following = await _turn(bench, conversation, messages, **more)
        name = TransferId(served.name)
        expected = EarlierTurn(name, *bench.decode.side_channel)
        assert _earlier(first) == expected, f"{_earlier(first)}, expected {expected}"
        served = following


async def the_turn_before_is_named_to_prefill(bench: Bench) -> None:
    """By its hand-off's name and the side channel of the D that served it."""
    await _check(bench, "whole")


async def the_turn_before_is_named_after_streams(bench: Bench) -> None:
    """The engine's stream does not carry it: the router knows it beforehand."""
    await _check(bench, "streamed", stream=True)


async def conversations_are_their_callers_own(bench: Bench) -> None:
    messages = chat("private")
    await _turn(bench, "private", messages, key="alice")
    following = _next(messages, "go on")
    first, _ = await _turn(bench, "private", following, key="mallory")
    assert _earlier(first) is None, "another caller's turn was named"
    first, _ = await _turn(bench, "private", following, key="alice")
    assert _earlier(first) is not None, "the caller's own turn was not named"


async def conversations_are_not_mixed(bench: Bench) -> None:
    one, other = chat("one"), chat("other")
    _, served = await _turn(bench, "conv-1", one)
    await _turn(bench, "conv-2", other)
    first, _ = await _turn(bench, "conv-1", _next(one, "go on"))
    found = _earlier(first)
    assert found is not None, "the turn before was not named"
    assert found.transfer_id == served.name, found


async def failed_turns_are_not_named(bench: Bench) -> None:
    """The turn before it is, or none."""
    messages = chat("failing")
    _, served = await _turn(bench, "failing", messages)
    following = _next(messages, "go on")
    bench.decode.behaviour.status = 500
    body = {"messages": following, "conversation_id": "failing"}
    got = await bench.post(body, CHAT)
    assert got.status >= 500, got
    failed = {leg.name for leg in bench.decode.legs}
    await bench.settle()
    first, _ = await _turn(bench, "failing", following)
    found = _earlier(first)
    assert found is None or found.transfer_id == served.name, (found, failed)
