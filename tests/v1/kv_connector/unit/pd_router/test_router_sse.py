# SPDX-License-Identifier: Apache-2.0
"""Framing and reading of server-sent events."""

import itertools
import random

import pytest

from pd_router import sse
from pd_router.sse import EventTooLargeError, Framer, Kind, classify

STREAM = (
    b": keep-alive\n\n"
    b'data: {"text": "a"}\n\n'
    b'event: x\r\ndata: {"text":\r\ndata:  "b"}\r\n\r\n'
    b"\r\n"
    b"data: c\r\rdata:d\n\r\n"
    + 'data: {"text": "\u00e4\U0001f600"}\n\n'.encode()
    + b"data: [DONE]\r\n\r\n"
)
DATA = [
    None,
    b'{"text": "a"}',
    b'{"text":\n "b"}',
    b"c",
    b"d",
    '{"text": "\u00e4\U0001f600"}'.encode(),
    b"[DONE]",
]


def framed(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    framer = Framer()
    blocks = [block for piece in pieces for block in framer.feed(piece)]
    return blocks, framer.rest()


def seen(blocks: list[bytes]) -> list[bytes | None]:
    """Data of the events, without bare line ends that belong to no event."""
    return [sse.event_data(b) for b in blocks if b.strip(b"\r\n")]


def test_every_cut_in_two_gives_the_same_events_and_bytes() -> None:
    for cut in range(len(STREAM) + 1):
        blocks, rest = framed([STREAM[:cut], STREAM[cut:]])
        assert b"".join(blocks) + rest == STREAM
        assert seen(blocks) == DATA


def test_random_cuts_give_the_same_events_and_bytes() -> None:
    random_cuts = random.Random(5)
    for _ in range(300):
        cuts = sorted(random_cuts.choices(range(len(STREAM) + 1), k=12))
        edges = [0, *cuts, len(STREAM)]
        blocks, rest = framed([STREAM[a:b] for a, b in itertools.pairwise(edges)])
        assert b"".join(blocks) + rest == STREAM
        assert seen(blocks) == DATA


def test_single_bytes_give_the_same_events_and_bytes() -> None:
    blocks, rest = framed([STREAM[i : i + 1] for i in range(len(STREAM))])
    assert b"".join(blocks) + rest == STREAM
    assert seen(blocks) == DATA


def test_an_event_is_given_out_as_soon_as_it_ends() -> None:
    framer = Framer()
    assert framer.feed(b"data: a\n") == []
    assert framer.feed(b"\ndata: b") == [b"data: a\n\n"]
    assert framer.rest() == b"data: b"


def test_a_line_end_of_two_bytes_is_no_blank_line() -> None:
    framer = Framer()
    assert framer.feed(b"data: a\r") == []
    assert framer.feed(b"\ndata: b\r\n") == []
    assert framer.feed(b"\r\n") == [b"data: a\r\ndata: b\r\n\r\n"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    framer = Framer()
    framer.feed(b"x" * 100)
    with pytest.raises(EventTooLargeError):
        framer.feed(b"x")


ROLE = '{"role": "assistant", "content": ""}'


def chunk(delta: str, finish: str = "null") -> bytes:
    return (
        b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, '
        + f'"delta": {delta}, "finish_reason": {finish}'.encode()
        + b"}]}\n\n"
    )


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (b": ping\n\n", Kind.IGNORED),
        (b"\n\n", Kind.IGNORED),
        (b"event: x\nid: 4\n\n", Kind.IGNORED),
        (b"data: [DONE]\n\n", Kind.DONE),
        (b"data:[DONE]\r\n\r\n", Kind.DONE),
        (b'data: {"error": {"message": "m"}}\n\n', Kind.ERROR),
        (b'data: {"error": "m"}\n\n', Kind.ERROR),
        (b'data: {"error": null, "choices": []}\n\n', Kind.CONTENT),
        (b'data: {"choices": [{"text": "\\"error\\""}]}\n\n', Kind.CONTENT),
        (b"data: not json\n\n", Kind.CONTENT),
        (chunk(ROLE), Kind.PREAMBLE),
        (chunk('{"role": "assistant"}'), Kind.PREAMBLE),
        (chunk('{"role": "assistant", "content": "a"}'), Kind.CONTENT),
        (chunk('{"content": ""}'), Kind.CONTENT),
        (chunk(ROLE, '"stop"'), Kind.CONTENT),
        (chunk('{"role": "assistant", "tool_calls": [{}]}'), Kind.CONTENT),
    ],
)
def test_what_an_event_means(block: bytes, kind: Kind) -> None:
    assert classify(block).kind is kind


def test_handoff_parameters_go_and_other_events_keep_their_bytes() -> None:
    block = b'data: {"id": 1,  "kv_transfer_params": {"a": 2}, "t": "\xc3\xa4"}\n\n'
    assert sse.without_params(block, classify(block)) == (
        'data: {"id":1,"t":"\u00e4"}\n\n'.encode()
    )
    plain = b'data: {"text":  "kv_transfer_params"}\n\n'
    assert sse.without_params(plain, classify(plain)) is plain


def test_whole_answers_lose_only_the_parameters() -> None:
    assert sse.strip_params(b'{"a": 1, "kv_transfer_params": null}') == b'{"a":1}'
    for body in (
        b'{"a":  1}',
        b'{"text":  "kv_transfer_params"}',
        b"no json kv_transfer_params",
        b'["kv_transfer_params"]',
    ):
        assert sse.strip_params(body) is body
