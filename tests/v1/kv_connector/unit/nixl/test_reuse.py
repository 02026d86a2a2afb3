# SPDX-License-Identifier: Apache-2.0
"""The prefill side of later turns, with a decode engine's real side channel."""

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import (
    HISTORY,
    NEXT,
    Cache,
    prompt,
)
from v1.kv_connector.unit.nixl.engine_side import ABORTED, BLOCK, finish
from v1.kv_connector.unit.nixl.reuse_side import (
    NAME,
    SHARED,
    SHORT,
    SIZE,
    Keeper,
    Side,
    T,
    kept_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Received,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import EarlierTurn
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    Kept,
    Ranks,
    Report,
    SideChannelError,
)

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    Cache()
    kept = kept_of()
    keeper = Keeper(lambda: (kept,))
    yield keeper
    keeper.close()


@pytest.fixture
def side(keeper: Keeper) -> Iterator[Side]:
    side = Side(keeper.address)
    yield side
    side.close()


@pytest.fixture
def asking() -> Iterator[Side]:
    """One whose question nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        side = Side(("127.0.0.1", mute.getsockname()[1]), timeout=SHORT)
        yield side
        side.close()


def test_what_is_kept_is_read(side: Side, keeper: Keeper) -> None:
    assert side.reuse.sizes() == {"reuse_asking": 1}
    assert side.known() == SHARED
    assert keeper.asked == [T]
    order = side.park()
    wanted = order.complete()
    assert order.address == keeper.address
    assert (wanted.transfer_id, wanted.mode) == (NAME, Mode.PULL)
    assert wanted.want == Want(SHARED, 0, SHARED, b"", BLOCK)
    assert wanted.blocks[0].tolist() == side.cache.table(side.request)[0]
    side.loads.received(0, Received(wanted.registration_id, SHARED, SIZE, 0.1))
    assert side.completed() == {"p"}
    side.cache.resume(side.request)
    assert side.request.num_computed_tokens == SHARED
    side.end()
    assert side.over()
    assert side.last() == ("read", SHARED, "")


def test_only_what_this_engine_lacks_is_read(keeper: Keeper) -> None:
    side = Side(keeper.address)
    before = prompt("before", HISTORY[: 3 * BLOCK + 2])
    side.cache.admit(before)
    side.cache.manager.free(before)
    assert side.known() == SHARED - 3 * BLOCK
    wanted = side.park().complete()
    assert wanted.want == Want(SHARED, 3 * BLOCK, SHARED - 3 * BLOCK, b"", BLOCK)
    assert wanted.blocks[0].tolist() == side.cache.table(side.request)[0][3:]
    side.close()


def test_a_prompt_that_is_all_kept(keeper: Keeper) -> None:
    side = Side(keeper.address, tokens=HISTORY[:SHARED])
    assert side.known() == SHARED
    side.park()
    side.close()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0, SHARED), (SHARED - 1, SHARED), (SHARED, SHARED), (SHARED + 1, 0)],
)
def test_both_sides_of_the_threshold(
    keeper: Keeper, threshold: int, expected: int
) -> None:
    side = Side(keeper.address, threshold)
    assert side.known() == expected
    side.admit(expected)
    assert bool(side.orders) == bool(expected)
    if not expected:
        # Not missed: it is kept, and would not have helped.
        assert side.last()[0] == "recomputed"
    side.close()


@pytest.mark.parametrize("threshold", [0, 1, 2 * BLOCK + 4, 2 * BLOCK + 5])
def test_the_threshold_counts_what_is_had_beyond_the_own_cache(
    keeper: Keeper, threshold: int
) -> None:
    side = Side(keeper.address, threshold)
    assert side.known() == SHARED
    assert side.reuse.matched(side.name, SHARED - 2 * BLOCK - 4) == (
        2 * BLOCK + 4 if threshold <= 2 * BLOCK + 4 else 0
    )
    side.close()


def test_no_threshold_reads_nothing_for_nothing(keeper: Keeper) -> None:
    side = Side(keeper.address, threshold=0)
    side.known()
    for computed in (SHARED, SHARED + BLOCK, len(NEXT)):
        assert side.reuse.matched(side.name, computed) == 0
    side.close()


def test_the_best_of_several_answers_is_read() -> None:
    Cache()
    answers = (
        kept_of(HISTORY[:40], TransferId("kept-short")),
        kept_of(HISTORY, TransferId("kept-best")),
        kept_of([*HISTORY[:70], *range(40)], TransferId("kept-other")),
    )
    keeper = Keeper(lambda: answers)
    side = Side(keeper.address)
    assert side.known() == SHARED
    assert side.park().request.transfer_id == TransferId("kept-best")
    side.close()
    keeper.close()


def test_what_is_not_kept_is_computed() -> None:
    keeper = Keeper(lambda: ())
    side = Side(keeper.address)
    assert side.known() == 0
    side.admit(0)
    assert side.orders == []
    assert side.last()[0] == "missed"
    # Preempted, it does not ask again.
    assert side.matched() == 0
    side.end()
    assert side.over()
    assert keeper.asked == [T]
    side.close()
    keeper.close()


def _raise() -> tuple[Kept, ...]:
    raise RuntimeError("out of order")


def test_a_keeper_that_fails_is_computed() -> None:
    keeper = Keeper(_raise)
    side = Side(keeper.address)
    assert side.known() == 0
    side.admit(0)
    assert "out of order" in str(side.last()[2])
    side.close()
    keeper.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        b"\x92\xa5found\xc0",
        encode(Ranks((b"x",))),
        encode(Report(b"{}")),
        encode(SideChannelError("no")),
        encode(Found(())) + b"\x00",
    ],
)
def test_an_answer_that_is_none_is_computed(answer: bytes) -> None:
    address = free_address()
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind(f"tcp://{address[0]}:{address[1]}")
        side = Side(address)
        assert sock.poll(10_000)
        *route, _ = sock.recv_multipart()
        sock.send_multipart([*route, answer])
        assert side.known() == 0
        side.admit(0)
        assert side.last()[0] == "missed"
        side.close()


def test_content_that_differs_is_computed(keeper: Keeper) -> None:
    side = Side(keeper.address, tokens=[1, *NEXT])
    assert side.known() == 0
    side.close()


def test_a_name_of_a_kept_entry_must_be_one() -> None:
    Cache()
    kept = msgspec.structs.replace(kept_of(), name=TransferId("somebody-s-hand-off"))
    keeper = Keeper(lambda: (kept,))
    side = Side(keeper.address)
    assert side.known() == 0
    side.close()
    keeper.close()


def test_a_name_is_of_no_use_without_the_token() -> None:
    Cache()
    token = Token(b"0123456789abcdef0123456789abcdef")
    kept = kept_of()
    keeper = Keeper(lambda: (kept,), token)
    for held in (None, Token(b"another token of the same length")):
        side = Side(keeper.address, token=held, timeout=SHORT)
        assert side.known() == 0
        side.close()
    assert keeper.asked == []
    side = Side(keeper.address, token=token)
    assert side.known() == SHARED
    side.close()
    keeper.close()


def test_silence_ends_at_the_deadline(asking: Side) -> None:
    assert asking.known() == 0
    asking.admit(0)
    assert "retention_lookup_timeout" in str(asking.last()[2])


def test_an_answer_after_the_deadline_is_nothing() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow() -> tuple[Kept, ...]:
        asked.set()
        go_on.wait(10)
        return (kept_of(),)

    keeper = Keeper(slow)
    side = Side(keeper.address, timeout=SHORT)
    assert asked.wait(10)
    assert side.known() == 0
    go_on.set()
    assert side.matched() == 0
    side.close()
    keeper.close()


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("no.such.host.invalid", 80)])
def test_an_engine_that_is_not_there(address: Address) -> None:
    side = Side(address, timeout=SHORT)
    assert side.known() == 0
    side.close()


def test_a_question_that_cannot_be_asked(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1)
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    with context.socket(zmq.PAIR):
        side = Side(keeper.address)
        assert side.known() == 0
    assert keeper.asked == []
    side.close()


def test_an_abort_while_asking(asking: Side) -> None:
    assert asking.matched() is None
    asking.reuse.finished(RequestId(finish(asking.request, ABORTED).request_id))
    assert asking.reuse.sizes() == {"reuse_asking": 0}
    assert asking.matched() == 0
    assert not asking.reuse._questions.pending
    assert asking.over()


def test_an_abort_between_answer_and_admission(side: Side) -> None:
    side.known()
    side.reuse.finished(side.name)
    assert side.matched() == 0
    assert side.over()


def test_an_engine_that_does_not_wait(asking: Side) -> None:
    # With prompt log-probabilities it allocates whatever it is told.
    assert asking.matched() is None
    asking.admit(0)
    assert asking.reuse.sizes() == {"reuse_asking": 0}
    assert not asking.reuse._questions.pending
    assert asking.last()[0] == "missed"


def test_many_questions_at_once(keeper: Keeper, side: Side) -> None:
    now = time.monotonic()
    others = [prompt(f"q{index}", NEXT) for index in range(100)]
    for other in others:
        side.reuse.new_request(other, EarlierTurn(T, *keeper.address), now)
    end = time.monotonic() + 20
    open_ = {RequestId(other.request_id) for other in others}
    found = set()
    while open_:
        assert time.monotonic() < end
        for name in list(open_):
            count = side.reuse.matched(name, 0)
            if count is not None:
                found.add(count)
                open_.remove(name)
    assert found <= {SHARED, 0}
    assert SHARED in found


def test_questions_are_closed(asking: Side) -> None:
    assert asking.matched() is None
    asking.reuse.close()
    assert not asking.reuse._questions.pending


def test_where_windows_let_go_all_that_is_kept_is_read_or_nothing(
    keeper: Keeper,
) -> None:
    edited = [*HISTORY[:-2], HISTORY[-2] + 1, *HISTORY[-1:], *NEXT[len(HISTORY) :]]
    for tokens, everywhere, at_the_end in (
        (NEXT, SHARED, SHARED),
        (edited, SHARED // BLOCK * BLOCK, 0),
    ):
        for whole_only, expected in ((False, everywhere), (True, at_the_end)):
            side = Side(keeper.address, tokens=tokens)
            side.reuse.whole_only = whole_only
            assert side.known() == expected
            side.close()
