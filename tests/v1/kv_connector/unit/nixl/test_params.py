# SPDX-License-Identifier: Apache-2.0
"""What clients and routers may write into ``kv_transfer_params``."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import is_kept
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    MAX_GROUPS,
    MAX_ID_CHARS,
    MAX_RECEIVERS,
    DecodeParams,
    EarlierTurn,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    Whereabouts,
    external_id,
    parse_params,
    prefill_result,
    retention_result,
)

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
READ = {**DECODE, "remote_generation": "5", "remote_block_ids": [[1, 2]]}


def test_a_prefill_leg() -> None:
    params = {**PREFILL, "transfer_id": "t", "num_receivers": 3}
    assert parse_params(params) == PrefillParams(TransferId("t"), 3)
    assert parse_params(PREFILL) == PrefillParams(None, None)


def test_a_decode_leg() -> None:
    params = {
        **DECODE,
        "transfer_id": "t",
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "tp_size": 2,
        "pp_size": 3,
        "remote_block_ids": [[1, 2]],
    }
    assert parse_params(params) == DecodeParams(
        TransferId("t"),
        RequestId("r"),
        PrefillAddress("10.0.0.1", 5600, EngineId("e"), tp_size=2, pp_size=3),
    )
    assert parse_params({**DECODE, "remote_engine_id": None}) == DecodeParams(
        None, None, PrefillAddress("10.0.0.1", 5600)
    )


def test_where_the_kv_is_said_to_lie() -> None:
    def said(**params: object) -> Whereabouts | None:
        parsed = parse_params({**READ, **params})
        assert isinstance(parsed, DecodeParams)
        return parsed.whereabouts

    assert said() == Whereabouts(5, ((1, 2),))
    assert said(remote_generation="7" + "f" * 15) == Whereabouts(2**63 - 1, ((1, 2),))
    assert said(remote_block_ids=[[], [2**31 - 1]]) == Whereabouts(
        5, ((), (2**31 - 1,))
    )
    assert said(remote_generation=None) is None
    assert said(remote_generation=None, remote_block_ids="x") is None
    assert said(remote_block_ids=None) is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": None}, {"x": 1}])
def test_no_hand_off_is_asked_for(params: object) -> None:
    assert parse_params(params) is None


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({**PREFILL, "transfer_id": 5}, "transfer_id"),
        ({**PREFILL, "transfer_id": ""}, "transfer_id"),
        ({**PREFILL, "transfer_id": "x" * (MAX_ID_CHARS + 1)}, "transfer_id"),
        ({**PREFILL, "transfer_id": "\ud800"}, "transfer_id"),
        ({**PREFILL, "transfer_id": "a\0b"}, "transfer_id"),
        ({**PREFILL, "num_receivers": 0}, "num_receivers"),
        ({**PREFILL, "num_receivers": True}, "num_receivers"),
        ({**PREFILL, "num_receivers": 1.0}, "num_receivers"),
        ({**PREFILL, "num_receivers": MAX_RECEIVERS + 1}, "num_receivers"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({**DECODE, "remote_host": None}, "remote_host"),
        ({**DECODE, "remote_host": ["h"]}, "remote_host"),
        ({**DECODE, "remote_host": "h\0"}, "remote_host"),
        ({**DECODE, "remote_port": None}, "remote_port"),
        ({**DECODE, "remote_port": "5600"}, "remote_port"),
        ({**DECODE, "remote_port": 0}, "remote_port"),
        ({**DECODE, "remote_port": 65536}, "remote_port"),
        ({**DECODE, "remote_engine_id": {}}, "remote_engine_id"),
        ({**DECODE, "tp_size": -1}, "tp_size"),
        ({**DECODE, "pp_size": 10**9}, "pp_size"),
        ({**READ, "remote_generation": 5}, "remote_generation"),
        ({**READ, "remote_generation": ""}, "remote_generation"),
        ({**READ, "remote_generation": "8" + "0" * 15}, "remote_generation"),
        ({**READ, "remote_generation": "0x5"}, "remote_generation"),
        ({**READ, "remote_generation": "5\n"}, "remote_generation"),
        ({**READ, "remote_block_ids": "12"}, "remote_block_ids"),
        ({**READ, "remote_block_ids": []}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [1, 2]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1]] * (MAX_GROUPS + 1)}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1, -1]]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[2**31, 1]]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1, 2**5000]]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1, True]]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1, None]]}, "remote_block_ids"),
        ({**READ, "remote_block_ids": [[1, 2.0]]}, "remote_block_ids"),
    ],
)
def test_what_cannot_be_used_is_named(params: dict[str, Any], key: str) -> None:
    with pytest.raises(ParamsError, match=rf"\['{key}'\].* expected") as raised:
        parse_params(params)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("params", [[], "x", 7, True])
def test_only_an_object_is_taken(params: object) -> None:
    with pytest.raises(ParamsError, match="expected an object"):
        parse_params(params)


def test_a_request_is_one_leg() -> None:
    with pytest.raises(ParamsError, match="both"):
        parse_params({**DECODE, "do_remote_decode": True})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_keys = st.sampled_from(
    [
        "do_remote_decode",
        "do_remote_prefill",
        "transfer_id",
        "num_receivers",
        "remote_host",
        "remote_port",
        "remote_engine_id",
        "remote_request_id",
        "tp_size",
        "pp_size",
        "remote_block_ids",
        "remote_generation",
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(_keys | st.text(), _json | st.booleans() | st.just("host")) | _json
)
def test_any_json_is_parsed_or_refused(params: object) -> None:
    try:
        parsed = parse_params(params)
    except ParamsError:
        return
    if isinstance(parsed, DecodeParams):
        assert parsed.address.host
        assert 0 < parsed.address.port < 2**16
        assert (parsed.transfer_id or "x").encode()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("generation", [None, 0, 1 << 32 | 5, 2**63 - 1])
def test_what_a_prefill_leg_returns_is_a_decode_leg(
    mode: Mode, generation: int | None
) -> None:
    address = PrefillAddress("10.0.0.1", 5600, EngineId("e"))
    result = prefill_result(
        mode=mode,
        transfer_id=TransferId("t"),
        request_id=RequestId("r"),
        address=address,
        block_ids=([3, 4],),
        num_tokens=20,
        generation=generation,
    )
    relayed = json.loads(json.dumps(result))
    assert relayed["remote_block_ids"] == [[3, 4]]
    assert relayed["remote_num_tokens"] == 20
    assert relayed["transfer_mode"] == mode.value
    said = None if generation is None else Whereabouts(generation, ((3, 4),))
    assert parse_params(relayed) == DecodeParams(
        TransferId("t"), RequestId("r"), address, whereabouts=said
    )


@pytest.mark.parametrize(
    ("request_id", "appended", "expected"),
    [
        ("cmpl-1-0-1234abcd", True, "cmpl-1-0"),
        ("cmpl-1-0-1234abcd", False, "cmpl-1-0-1234abcd"),
        ("short", True, "short"),
        ("-1234abcd", True, "-1234abcd"),
        ("x1234567890", True, "x1234567890"),
    ],
)
def test_the_name_outside_is_without_what_the_engine_appended(
    request_id: str, appended: bool, expected: str
) -> None:
    assert external_id(request_id, appended) == expected


@pytest.mark.parametrize(
    "key", ["transfer_id", "remote_request_id", "release_transfer_id"]
)
def test_a_hand_off_is_not_called_like_kept_kv(key: str) -> None:
    """Its messages would go to the wrong table, and that would vouch for it."""
    with pytest.raises(ParamsError, match=rf"{key}.*'kept-'"):
        parse_params({**DECODE, key: "kept-x"})


def test_a_prefill_leg_is_not_called_like_kept_kv() -> None:
    with pytest.raises(ParamsError, match=r"transfer_id.*'kept-'"):
        parse_params({**PREFILL, "transfer_id": "kept-x"})


def test_a_front_end_may_call_a_request_like_kept_kv() -> None:
    outside = external_id("kept-x-12345678", True)
    assert outside == external_id("kept-x", False)
    assert not is_kept(outside)


def test_a_prefill_leg_that_continues_a_conversation() -> None:
    params = {
        **PREFILL,
        "retained_transfer_id": "t1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
    }
    earlier = EarlierTurn(TransferId("t1"), "10.0.0.1", 5600)
    assert parse_params(params) == PrefillParams(None, None, earlier)


def test_a_turn_is_also_known_by_what_the_decode_leg_calls_its_request() -> None:
    told = retention_result(
        mode=Mode.PULL,
        transfer_id=TransferId("t1"),
        address=PrefillAddress("10.0.0.1", 5600, EngineId("e")),
        num_groups=2,
        num_tokens=40,
        expires_at=1e9,
    )
    assert told["remote_block_ids"] == [[], []]
    earlier = EarlierTurn(TransferId("t1"), "10.0.0.1", 5600)
    assert parse_params({**told, **PREFILL}) == PrefillParams(None, None, earlier)
    del told["retained_transfer_id"]
    assert parse_params({**told, **PREFILL}) == PrefillParams(None, None, earlier)
    for key in ("remote_request_id", "remote_host", "remote_port"):
        assert parse_params({**told, **PREFILL, key: None}) == PrefillParams(None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_host", None),
        ("remote_port", 65536),
        ("retained_transfer_id", 7),
        ("retained_transfer_id", "kept-x"),
    ],
)
def test_an_earlier_turn_that_cannot_be_used_does_not_harm_the_hand_off(
    key: str, value: object
) -> None:
    params = {
        **PREFILL,
        "transfer_id": "t2",
        "retained_transfer_id": "t1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
    }
    parsed = parse_params({**params, key: value})
    assert isinstance(parsed, PrefillParams)
    assert (parsed.transfer_id, parsed.earlier) == ("t2", None)
    assert key in parsed.problem


def test_a_decode_leg_that_says_what_is_kept() -> None:
    parsed = parse_params({**DECODE, "retain": False, "release_transfer_id": "t1"})
    assert isinstance(parsed, DecodeParams)
    assert (parsed.retain, parsed.releases) == (False, TransferId("t1"))
    parsed = parse_params({**DECODE, "retain": None})
    assert isinstance(parsed, DecodeParams)
    assert (parsed.retain, parsed.releases) == (True, None)
    with pytest.raises(ParamsError, match="retain"):
        parse_params({**DECODE, "retain": "no"})
