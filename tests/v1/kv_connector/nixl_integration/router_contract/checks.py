# SPDX-License-Identifier: Apache-2.0
"""What every router owes: one check each, which raises ``AssertionError``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp

from router_contract.bench import PROMPT, Bench, Got
from router_contract.engines import (
    CHAT,
    COMPLETIONS,
    MODEL,
    PIECES,
    Leg,
    answer_text,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    PrefillParams,
)

Run: TypeAlias = Callable[[Bench], Awaitable[None]]

AT_ONCE = 24
FIRST_WORD_TIMEOUT_S = 5.0
TOGETHER_TIMEOUT_S = 5.0
"""How much later than the prefill leg the decode leg may come in push."""

FORGED = "forged-by-the-client"
LOGPROBS = 2
"""Fields of the request below whose values the routers must not touch."""

ASKED: Mapping[str, Any] = {
    "max_tokens": 50,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "logprobs": LOGPROBS,
    "stop": ["\n\n", "END"],
    "logit_bias": {"11": -100},
    "user": "someone",
    "cache_salt": "salt",
    "x_unknown": {"nested": [1, None, "z"]},
}


@dataclass(frozen=True)
class Check:
    """One check and the routers that it is for."""

    name: str
    run: Run
    modes: tuple[Mode, ...] = tuple(Mode)
    conversations: bool = False

    def applies(self, mode: Mode, conversations: bool) -> bool:
        """Whether a router of this kind must pass it."""
        return mode in self.modes and (conversations or not self.conversations)


def chat(text: str) -> list[dict[str, str]]:
    """The messages of a chat."""
    return [{"role": "user", "content": PROMPT + text}]


def only(legs: list[Leg], role: str) -> Leg:
    """The one leg that there must be."""
    assert len(legs) == 1, f"{len(legs)} {role} legs, expected one"
    return legs[0]


def both(bench: Bench) -> tuple[Leg, Leg]:
    """The legs of the only request, each of its kind."""
    first = only(bench.prefill.legs, "prefill")
    second = only(bench.decode.legs, "decode")
    assert isinstance(first.params, PrefillParams), (
        f"the prefill leg's params are not one's: {first.raw_params} {first.problem}"
    )
    assert isinstance(second.params, DecodeParams), (
        f"the decode leg's params are not one's: {second.raw_params} {second.problem}"
    )
    return first, second


async def served(bench: Bench, body: Mapping[str, Any], path: str = COMPLETIONS) -> Got:
    """Send a request that must be answered with 200."""
    got = await bench.post(body, path)
    assert got.status == 200, f"the router answered {got}"
    return got


# ---- the two legs


async def legs_share_a_fresh_name(bench: Bench) -> None:
    """Also where a client sends the same request with the same id again."""
    names: list[str] = []
    for _ in range(3):
        got = await bench.post(headers={"X-Request-Id": "the-same"})
        assert got.texts == [answer_text(PROMPT)], got
        first, second = both(bench)
        assert first.name == second.name, f"{first.name!r} and {second.name!r}"
        names.append(first.name)
        bench.prefill.legs.clear()
        bench.decode.legs.clear()
    assert len(set(names)) == len(names), f"used again: {names}"


async def prefill_leg_is_one_whole_token(bench: Bench) -> None:
    """One token of one answer, not streamed, whatever the client wants."""
    wanted = {
        "max_tokens": 50,
        "min_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await served(bench, wanted)
    chatting = {**wanted, "messages": chat(""), "max_completion_tokens": 60}
    await served(bench, chatting, CHAT)
    assert len(bench.prefill.legs) == 2, bench.prefill.legs
    for leg in bench.prefill.legs:
        body = leg.body
        assert body.get("max_tokens") == 1, f"max_tokens is {body.get('max_tokens')}"
        for key in ("max_completion_tokens", "min_tokens"):
            assert (body.get(key) or 0) <= 1, f"{key} is {body[key]}"
        assert not body.get("stream"), "the prefill leg is streamed"
        # The engine refuses them where nothing is streamed.
        assert body.get("stream_options") is None, body["stream_options"]


async def order_of_legs(bench: Bench) -> None:
    """Push: both at once. Pull: D after P's answer."""
    bench.prefill.behaviour.hold = asyncio.Event()
    asked = asyncio.create_task(bench.post())
    try:
        await bench.prefill.leg()
        if bench.mode is Mode.PUSH:
            await bench.decode.leg(within=TOGETHER_TIMEOUT_S)
        else:
            await asyncio.sleep(0.3)
            assert not bench.decode.legs, "D was asked before P had answered"
    finally:
        bench.prefill.behaviour.hold.set()
    assert (await asked).texts == [answer_text(PROMPT)]


async def decode_leg_has_the_prefill_address(bench: Bench) -> None:
    await served(bench, {})
    _, second = both(bench)
    assert isinstance(second.params, DecodeParams)
    address = second.params.address
    assert (address.host, address.port) == bench.prefill.side_channel, address


async def coordinates_are_relayed_as_they_are(bench: Bench) -> None:
    """Fields that the router does not know too; it may add some."""
    await served(bench, {})
    first, second = both(bench)
    assert first.answered is not None
    for key, value in first.answered.items():
        assert key in second.raw_params, f"{key} is lost"
        assert second.raw_params[key] == value, f"{key}: {second.raw_params[key]!r}"


async def receivers_are_announced(bench: Bench) -> None:
    """``n`` of the client is for D; P computes once and is told how many come."""
    got = await served(bench, {"n": 3, "temperature": 1.0})
    assert got.texts == [answer_text(PROMPT, index) for index in range(3)]
    first, second = both(bench)
    assert isinstance(first.params, PrefillParams)
    assert first.params.num_receivers == 3, first.raw_params
    assert first.receivers == 1, f"n of the prefill leg is {first.receivers}"
    assert second.receivers == 3


# ---- what is the client's


async def request_reaches_decode_as_it_is(bench: Bench) -> None:
    """All of it, in both kinds of request; nothing is added but the params."""
    for path, asked in (
        (COMPLETIONS, dict(ASKED)),
        (
            CHAT,
            {
                **ASKED,
                "logprobs": True,
                "top_logprobs": LOGPROBS,
                "messages": chat(""),
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "chat_template_kwargs": {"thinking": False},
            },
        ),
    ):
        await served(bench, asked, path)
        first, second = both(bench)
        for key, value in asked.items():
            assert second.body.get(key) == value, f"{key}: {second.body.get(key)!r}"
        more = set(second.body) - set(asked) - {"model", "prompt", "kv_transfer_params"}
        assert not more, f"added: {sorted(more)}"
        assert first.path == second.path == path
        # A template may use any of them, so that P must see them too.
        same = ("messages", "prompt", "tools", "chat_template_kwargs", "x_unknown")
        for key in (*same, "cache_salt", "model"):
            assert first.body.get(key) == second.body.get(key), f"{key} differs for P"
        bench.prefill.legs.clear()
        bench.decode.legs.clear()


async def params_of_clients_have_no_effect(bench: Bench) -> None:
    """They are refused, or replaced."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": FORGED,
        "remote_host": FORGED,
        "remote_port": 1,
        "remote_request_id": FORGED,
        "retained_transfer_id": FORGED,
        "release_transfer_id": FORGED,
        "remote_prefill_cached_tokens": 9999,
        FORGED: FORGED,
    }
    got = await bench.post({"kv_transfer_params": params})
    legs = [*bench.prefill.legs, *bench.decode.legs]
    if 400 <= got.status < 500:
        assert not legs, "the request was refused and yet sent to an engine"
        return
    assert got.texts == [answer_text(PROMPT)], got
    for leg in legs:
        passed = [
            key
            for key, value in leg.raw_params.items()
            if value in (FORGED, 9999) or key == FORGED
        ]
        assert not passed, f"passed through: {passed}"


async def params_of_engines_are_kept_from_clients(bench: Bench) -> None:
    # Of a turn D says where it is kept.
    more = {"conversation_id": "any"} if bench.spec.conversations else {}
    got = await served(bench, more)
    assert bench.decode.legs[0].answered, "D was told to keep nothing"
    assert b"kv_transfer_params" not in got.body, "the client was told them"


async def prompts_of_a_list_are_handed_off_singly(bench: Bench) -> None:
    """A hand-off has one prompt; the answers come in the prompts' order."""
    prompts = [PROMPT + str(number) for number in range(3)]
    got = await served(bench, {"prompt": prompts})
    assert got.texts == [answer_text(prompt) for prompt in prompts], got
    names = {leg.name for leg in bench.decode.legs}
    assert len(names) == len(bench.decode.legs) == 3, names
    assert {leg.name for leg in bench.prefill.legs} == names


async def chats_are_handed_off(bench: Bench) -> None:
    messages = chat("")
    got = await served(bench, {"messages": messages}, CHAT)
    assert got.texts == [answer_text(messages)], got
    first, second = both(bench)
    assert first.name == second.name, f"{first.name!r} and {second.name!r}"


async def streams_arrive_as_they_are_made(bench: Bench) -> None:
    """Word by word: the first before the engine has the second, all in order."""
    for path, asked in ((COMPLETIONS, {}), (CHAT, {"messages": chat("")})):
        pause = bench.decode.behaviour.pause = asyncio.Event()
        prompt = asked.get("messages", PROMPT)
        body = {"model": MODEL, "prompt": PROMPT, "stream": True, **asked}
        if asked:
            del body["prompt"]
        try:
            data = await _streamed(bench, path, body, pause)
        finally:
            pause.set()
        got = Got(200, body=data)
        assert got.streamed == {0: answer_text(prompt)}, got
        assert len(got.events) >= PIECES, "words were put together"
        assert got.done, got


async def _streamed(
    bench: Bench, path: str, body: Mapping[str, Any], pause: asyncio.Event
) -> bytes:
    """A stream whose second word is made when the first has arrived."""
    data = b""
    response: aiohttp.ClientResponse | None = None
    try:
        try:
            async with asyncio.timeout(FIRST_WORD_TIMEOUT_S):
                response = await bench.session.post(bench.url + path, json=body)
                while response.status == 200 and b'"index"' not in data:
                    data += await response.content.readany()
        except TimeoutError:
            raise AssertionError("the first word was held back") from None
        assert response.status == 200, f"the router answered {response.status}"
        kind = response.headers["Content-Type"]
        assert kind.startswith("text/event-stream"), f"Content-Type is {kind}"
        pause.set()
        return data + await response.content.read()
    finally:
        if response is not None:
            response.close()


async def requests_at_once_are_not_mixed(bench: Bench) -> None:
    """Every answer is to its own prompt, every hand-off has its own name."""
    bench.prefill.behaviour.slowness = bench.decode.behaviour.slowness = 0.3
    prompts = [PROMPT + f"number {number}" for number in range(AT_ONCE)]

    async def ask(number: int, prompt: str) -> None:
        stream = number % 2 == 0
        got = await served(bench, {"prompt": prompt, "stream": stream})
        text = got.streamed.get(0) if stream else got.texts[0]
        assert text == answer_text(prompt), f"the answer to {prompt[-9:]!r} is wrong"

    await asyncio.gather(*(ask(*asked) for asked in enumerate(prompts)))
    asked_p = {leg.name: leg.prompt for leg in bench.prefill.legs}
    asked_d = {leg.name: leg.prompt for leg in bench.decode.legs}
    assert len(asked_p) == AT_ONCE, f"{len(asked_p)} names for {AT_ONCE} requests"
    assert asked_p == asked_d
