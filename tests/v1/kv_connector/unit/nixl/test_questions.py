# SPDX-License-Identifier: Apache-2.0
"""Questions on the side channel, their answers, and bytes that are neither."""

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.hostile import mutations
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    WireError,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    GetFailure,
    GetHandoffs,
    GetIntegrity,
    GetRanks,
    Kept,
    Lookup,
    Ranks,
    Release,
    Report,
    SideChannelError,
    SideChannelReply,
    SideChannelRequest,
    decode_reply,
    decode_request,
)

T = TransferId("t")

REQUESTS: list[SideChannelRequest] = [
    GetRanks(1),
    GetIntegrity(),
    GetHandoffs(),
    GetFailure(T),
    Lookup(T),
    Release(T),
]
REPLIES: list[SideChannelReply] = [
    Ranks((b"a",)),
    Report(b"{}"),
    Found((Kept(T, 1, 17, 16, "h", bytes(16), b"", b"t"),)),
    SideChannelError("no"),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_survive_the_wire(request_: msgspec.Struct) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES)
def test_replies_survive_the_wire(reply: msgspec.Struct) -> None:
    assert decode_reply(encode(reply)) == reply


def test_every_question_and_answer_is_covered() -> None:
    assert {type(asked) for asked in REQUESTS} == set(get_args(SideChannelRequest))
    assert {type(reply) for reply in REPLIES} == set(get_args(SideChannelReply))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from([*REQUESTS, *REPLIES]), mutations)
def test_any_bytes_are_a_question_an_answer_or_refused(
    message: msgspec.Struct, mutate: Callable[[bytes], bytes]
) -> None:
    data = mutate(encode(message))
    for decode, kinds in (
        (decode_request, get_args(SideChannelRequest)),
        (decode_reply, get_args(SideChannelReply)),
    ):
        try:
            value = decode(data)
        except WireError:
            continue
        assert isinstance(value, kinds)
