# SPDX-License-Identifier: Apache-2.0
"""The prefill side of later turns, with a decode engine's real side channel."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import (
    HISTORY,
    NEXT,
    Cache,
    content,
    prompt,
)
from v1.kv_connector.unit.nixl.engine_side import ABORTED, BLOCK, BLOCKS, finish
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Command,
    Receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import EarlierTurn
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.loads import Loads
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import PinBoard
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import Records
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.reuse import ReuseSide
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import StatsCollector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    Found,
    Kept,
    Ranks,
    Report,
    SideChannelError,
    Want,
    encode,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

pytestmark = pytest.mark.timeout(90)

T = TransferId("turn-1")
NAME = TransferId("kept-0")
TIMEOUT = 20.0
SHORT = 0.3
"""For questions that nobody answers."""

SIZE = TransferSize(1000, 2)
SHARED = len(HISTORY) - 1


def _kept(tokens: list[int] = HISTORY, name: TransferId = NAME) -> Kept:
    """What a decode engine keeps after an answer that ends these tokens."""
    return content().describe(prompt("d", tokens), len(tokens) - 1, name, 1)


class Keeper:
    """The side channel of a decode engine."""

    def __init__(self, answer: Callable[[], tuple[Kept, ...]]) -> None:
        self.address = free_address()
        self.asked: list[TransferId] = []
        self._answer = answer
        self._server = SideChannelServer(self.address, [encode(HERE)], self)

    def integrity(self) -> object:
        return {}

    def handoffs(self) -> object:
        return []

    def failure(self, transfer_id: TransferId) -> object:
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        self.asked.append(transfer_id)
        return self._answer()

    def release(self, transfer_id: TransferId) -> object:
        return None

    def close(self) -> None:
        self._server.close()


class Side:
    """The prefill side with its surroundings, and one request."""

    def __init__(
        self,
        address: Address,
        threshold: int = 1,
        tokens: list[int] = NEXT,
        world_size: int = 1,
        token: Token | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.cache = Cache()
        self.pins = PinBoard()
        self.pins.bind(self.cache.manager.block_pool)
        self.records = Records()
        self.orders: list[Command] = []
        self.loads = Loads(
            BLOCK,
            world_size,
            self.pins,
            self.records,
            StatsCollector(),
            self.orders,
            self.take_apart,
        )
        self.reuse = ReuseSide(
            threshold, timeout, 20.0, content(), self.loads, self.records, token
        )
        self.request = prompt("p", tokens)
        self.name = RequestId("p")
        earlier = EarlierTurn(T, *address)
        self.reuse.new_request(self.request, earlier, time.monotonic())

    def take_apart(self, request: Request) -> None:
        self.cache.manager.free(request)
        request.num_computed_tokens = 0

    def matched(self) -> int | None:
        _, computed = self.cache.cached(self.request)
        return self.reuse.matched(self.name, computed)

    def known(self) -> int:
        """What is matched, once that is known."""
        end = time.monotonic() + TIMEOUT + 15
        while (count := self.matched()) is None:
            assert time.monotonic() < end
            time.sleep(0.002)
        return count

    def admit(self, external: int) -> None:
        blocks = self.cache.admit(self.request, external)
        assert blocks is not None
        self.reuse.allocated(self.name, blocks, external, time.monotonic())

    def park(self) -> Receive:
        """Go on until the READ is ordered."""
        self.admit(self.known())
        (order,) = self.orders
        assert isinstance(order, Receive)
        self.orders.clear()
        return order

    def completed(self) -> set[str]:
        output = KVConnectorOutput()
        self.loads.complete(output)
        return output.finished_recving or set()

    def end(self) -> None:
        self.reuse.finished(self.name)
        self.loads.finished(self.name)
        self.cache.manager.free(self.request)

    def over(self) -> bool:
        sizes = (*self.reuse.sizes().values(), *self.loads.sizes().values())
        return self.cache.free() == BLOCKS - 1 and not any(
            (*sizes, *self.pins.counts().values())
        )

    def last(self) -> tuple[object, object, object]:
        record = self.records.latest()[-1]
        assert (record["role"], record["transfer_id"]) == ("reader", T)
        return record["outcome"], record["tokens"], record["cause"]

    def close(self) -> None:
        self.reuse.close()


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    Cache()
    kept = _kept()
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
    wanted = order.request
    assert order.address == keeper.address
    assert (wanted.transfer_id, wanted.mode) == (NAME, Mode.PULL)
    assert wanted.want == Want(SHARED, 0, SHARED, b"")
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
    wanted = side.park().request
    assert wanted.want == Want(SHARED, 3 * BLOCK, SHARED - 3 * BLOCK, b"")
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
        _kept(HISTORY[:40], TransferId("kept-short")),
        _kept(HISTORY, TransferId("kept-best")),
        _kept([*HISTORY[:70], *range(40)], TransferId("kept-other")),
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
    kept = msgspec.structs.replace(_kept(), name=TransferId("somebody-s-hand-off"))
    keeper = Keeper(lambda: (kept,))
    side = Side(keeper.address)
    assert side.known() == 0
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
        return (_kept(),)

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


# ---- the READ fails


@pytest.mark.parametrize("quiet", [True, False])
def test_a_read_that_fails_is_computed_here(side: Side, quiet: bool) -> None:
    registration_id = side.park().request.registration_id
    failed = ReceiveFailed(registration_id, FailureKind.LEASE, "let go", quiet)
    side.loads.failed(0, failed)
    assert side.loads.failing() == frozenset()
    assert side.completed() == {"p"}
    assert side.completed() == set()
    assert side.request.num_computed_tokens == 0
    held = -(-SHARED // BLOCK)
    assert side.pins.counts()["quiescing"] == (0 if quiet else held)
    assert side.cache.free() == BLOCKS - 1 - (0 if quiet else held)
    # Nothing of what may be half read is ever found in the cache.
    side.cache.resume(side.request)
    assert side.cache.cached(side.request)[1] == 0
    assert side.matched() == 0
    side.admit(0)
    assert side.orders == []
    assert side.request.num_computed_tokens == len(NEXT)
    if not quiet:
        taken = set(side.cache.table(side.request)[0])
        assert len(taken) == -(-len(NEXT) // BLOCK)
        side.loads.quiet(0, ReceiveQuiet(registration_id))
    side.end()
    assert side.over()
    assert side.last() == ("recomputed", 0, "let go")


def test_blocks_of_the_own_cache_survive_a_failed_read(keeper: Keeper) -> None:
    side = Side(keeper.address)
    before = prompt("before", HISTORY[: 3 * BLOCK])
    side.cache.admit(before)
    registration_id = side.park().request.registration_id
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.TRANSFER, "broken", False)
    )
    side.completed()
    side.cache.resume(side.request)
    assert side.cache.cached(side.request)[1] == 3 * BLOCK
    side.admit(0)
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    side.end()
    side.cache.manager.free(before)
    assert side.over()
    side.close()


def test_one_of_two_ranks_fails(keeper: Keeper) -> None:
    side = Side(keeper.address, world_size=2)
    registration_id = side.park().request.registration_id
    side.loads.received(0, Received(registration_id, SHARED, SIZE, 0.1))
    assert side.completed() == set()
    failed = ReceiveFailed(registration_id, FailureKind.REFUSED, "gone", True)
    side.loads.failed(1, failed)
    assert side.orders == [CancelReceive(registration_id, "gone")]
    assert side.completed() == {"p"}
    side.end()
    assert side.over()
    side.close()


def test_an_abort_under_the_read(side: Side) -> None:
    registration_id = side.park().request.registration_id
    side.end()
    assert side.completed() == {"p"}
    assert side.cache.free() < BLOCKS - 1
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.CANCELLED, "ended", False)
    )
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    assert side.over()
    assert side.last()[0] == "aborted"


def test_an_abort_after_the_read_has_failed(side: Side) -> None:
    registration_id = side.park().request.registration_id
    side.loads.failed(
        0, ReceiveFailed(registration_id, FailureKind.LEASE, "let go", True)
    )
    side.end()
    assert side.completed() == {"p"}
    assert side.over()


def test_questions_are_closed(asking: Side) -> None:
    assert asking.matched() is None
    asking.reuse.close()
    assert not asking.reuse._questions.pending
