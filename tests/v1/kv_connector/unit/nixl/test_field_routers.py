# SPDX-License-Identifier: Apache-2.0
"""Hand-offs that routers of other make mean are the ones that our engines do."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import pytest

from field_routers import (
    FIELD,
    IDENTITY_NEEDED,
    NO_HANDOFF,
    FieldRouter,
    Place,
    decode_params,
    filled,
)
from v1.kv_connector.unit.nixl.turns_engine import ANSWER, PROMPT, Engine
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Expect,
    Receive,
    Watch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    parse_params,
    prefill_result,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.timeout(90)

KINDS = {"push": NixlPushConnector, "pull": NixlPullConnector}
FRONT_ENDS = {
    "completions": "cmpl-{}-0-{:08x}",
    "chat": "chatcmpl-{}-{:08x}",
    "in process": "{}-{:08x}",
}
"""How the front end names the request of an ``X-Request-Id``, and what the engine
appends; Dynamo calls the engine without one."""

Start: TypeAlias = Callable[[str], Engine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    engines: list[Engine] = []

    def made(mode: str) -> Engine:
        engines.append(Engine(monkeypatch, KINDS[mode], kv_recompute_threshold=16))
        return engines[-1]

    yield made
    for engine in engines:
        engine.connector.shutdown()


def _values(p: Engine, outside: str) -> dict[Place, Any]:
    return {
        Place.TRANSFER_ID: f"xfer-{uuid.uuid4()}",
        Place.REQUEST_ID: outside,
        Place.ENGINE_ID: "engine",
        Place.HOST: p.address[0],
        Place.PORT: p.address[1],
    }


def _answer(router: FieldRouter, p: Engine, expected: Expect, request: Request) -> Any:
    """What P returns, as the router reads it."""
    return json.loads(
        json.dumps(
            prefill_result(
                mode=Mode(router.mode),
                transfer_id=expected.transfer_id,
                request_id=RequestId(request.request_id),
                address=PrefillAddress(*p.address, EngineId("engine")),
                block_ids=([1, 2, 3],),
                num_tokens=request.num_prompt_tokens,
                generation=7 if router.mode == "pull" else None,
            )
        )
    )


def _expect(p: Engine) -> Expect:
    (found,) = (order for order in p.orders() if isinstance(order, Expect))
    return found


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", FIELD)
def test_both_legs_mean_one_hand_off(start: Start, name: str, front_end: str) -> None:
    router = FIELD[name]
    p, d = start(router.mode), start(router.mode)
    outside = router.request_id.format(uuid=uuid.uuid4())
    values = _values(p, outside)
    p_id, d_id = (FRONT_ENDS[front_end].format(outside, i) for i in (0xA1, 0xB2))

    first = filled(router.prefill, values)
    parsed = parse_params(first)
    named = values[Place.TRANSFER_ID] if "transfer_id" in router.prefill else None
    assert parsed == PrefillParams(named, None)
    request = p.arrive(p_id, PROMPT, first)
    expected = _expect(p)
    second = decode_params(router, _answer(router, p, expected, request), values)
    parsed = parse_params(second)
    assert isinstance(parsed, DecodeParams)
    assert parsed.retain
    assert (parsed.whereabouts is not None) is (router.mode == "pull")

    leg = d.arrive(d_id, PROMPT, second)
    (watch,) = (order for order in d.orders() if isinstance(order, Watch))
    assert watch.address == p.address
    # Not by an alias: both have the same name for it.
    assert watch.transfer_id == expected.transfer_id
    assert d.matched(leg) == len(PROMPT)
    assert d.admit(leg)
    (receive,) = (order for order in d.orders() if isinstance(order, Receive))
    whole = receive.complete()
    assert (whole.transfer_id, receive.address) == (watch.transfer_id, p.address)
    assert isinstance(whole.want, Want)
    assert whole.want.num_tokens == len(PROMPT)


def test_an_answer_in_push_is_what_llm_d_remembers(start: Start) -> None:
    """Or it would send the legs one after the other."""
    router = FIELD["llm-d push, both at once"]
    p = start(router.mode)
    request = p.arrive("cmpl-x-0-00000001", PROMPT, {"do_remote_decode": True})
    answered: Mapping[str, Any] = _answer(router, p, _expect(p), request)
    assert answered["transfer_mode"] == "push"
    assert router.relayed is not None
    assert router.relayed <= set(answered)
    for key in router.relayed:
        assert isinstance(answered[key], str | int | float), key
        assert not isinstance(answered[key], bool)
    assert set(answered) >= IDENTITY_NEEDED


def test_a_turn_is_read_back_by_what_llm_d_replays(start: Start) -> None:
    router = FIELD["llm-d pull, bidirectional"]
    d, p = start(router.mode), start(router.mode)
    told = json.loads(json.dumps(d.turn("chatcmpl-one")))
    # What it takes for complete.
    assert told["do_remote_decode"] is True
    assert len(told["remote_block_ids"]) > 0
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        assert told[key]
        assert isinstance(told[key], str)
    assert isinstance(told["remote_port"], int)

    replayed = {key: told[key] for key in router.conversation if key in told}
    first = {**filled(router.prefill, {}), **replayed}
    assert "retained_transfer_id" not in first
    following = [*PROMPT, *ANSWER, *range(30)]
    request = p.arrive("chatcmpl-two-00000001", following, first)
    assert p.admit(request)
    (receive,) = (order for order in p.orders() if isinstance(order, Receive))
    whole = receive.complete()
    assert receive.address == d.address
    assert whole.want.num_tokens == len(PROMPT) + len(ANSWER) - 1


@pytest.mark.parametrize("name", NO_HANDOFF)
def test_what_is_no_hand_off_of_ours_is_computed_by_decode(
    start: Start, name: str
) -> None:
    params = dict(NO_HANDOFF[name])
    with pytest.raises(ParamsError, match="remote_host"):
        parse_params(params)
    d = start("pull")
    request = d.arrive("cmpl-x-0-00000001", PROMPT, params)
    assert d.matched(request) == 0
    assert request.status is RequestStatus.WAITING
