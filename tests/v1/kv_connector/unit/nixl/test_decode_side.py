# SPDX-License-Identifier: Apache-2.0
"""The decode side in the scheduler, on a real block pool."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    ABORTED,
    BLOCK,
    BLOCKS,
    STOPPED,
    allocate,
    available,
    finish,
    free,
    pool,
    request,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Command,
    Receive,
    TellNotNeeded,
    Unwatch,
    Watch,
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
    RegistrationId,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    PrefillAddress,
    Whereabouts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.prompt import prompt_digest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.decode import (
    DecodeSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.loads import (
    QUARANTINE_LOG_SECONDS,
    Loads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import (
    PinBoard,
    PinState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.records import Records
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import StatsCollector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.v1.outputs import KVConnectorOutput

T = TransferId("t")
HERE = ("127.0.0.1", 5600)
PARAMS = DecodeParams(T, RequestId("p-1"), PrefillAddress(*HERE))
SIZE = TransferSize(1000, 2)
TIMEOUT = 60.0


class Side:
    """A decode side with its surroundings, and one request."""

    def __init__(
        self, world_size: int = 1, mode: Mode = Mode.PUSH, lends: bool = True
    ) -> None:
        self.pool = pool()
        self.pins = PinBoard()
        self.pins.bind(self.pool, lends=lends)
        self.records = Records()
        self.stats = StatsCollector()
        self.orders: list[Command] = []
        self.loads = Loads(
            BLOCK,
            world_size,
            self.pins,
            self.records,
            self.stats,
            self.orders,
            take_apart=lambda _: None,
        )
        self.side = DecodeSide(
            mode, TIMEOUT, True, self.loads, self.records, self.orders
        )
        self.request = request("r-12345678")
        self.name = RequestId(self.request.request_id)

    def arrive(self, params: DecodeParams = PARAMS) -> None:
        self.side.new_request(self.request, params)

    def park(self, computed: int = 0) -> RegistrationId:
        """The engine allocates blocks and parks the request."""
        self.arrive()
        external = self.side.matched(self.name, computed)
        self.held = allocate(self.pool, 3)
        self.side.allocated(self.name, self.held, external, 0)
        receive = self.commands()[1]
        assert isinstance(receive, Receive)
        self.receive = receive
        return receive.request.registration_id

    def commands(self) -> list[Command]:
        assert not self.failing()
        commands = self.orders.copy()
        self.orders.clear()
        return commands

    def failing(self) -> set[str]:
        return set(self.loads.failing())

    def complete(self, failed: set[str] | None = None) -> set[str]:
        """A step's output, with what the worker was told to report."""
        output = KVConnectorOutput(failed_recving=failed or set())
        self.loads.complete(output)
        return output.finished_recving or set()

    def end(self, status: Any = STOPPED) -> None:
        """The engine lets go of the request."""
        self.side.finished(finish(self.request, status))
        self.loads.finished(self.name)
        free(self.pool, self.held)

    def over(self) -> bool:
        return (
            available(self.pool) == BLOCKS - 1
            and not any((*self.side.sizes().values(), *self.loads.sizes().values()))
            and not any(self.pins.counts().values())
        )

    def last(self) -> dict[str, object]:
        return self.records.latest()[-1]


@pytest.fixture(params=[True, False], ids=["lent", "pinned"])
def side(request: pytest.FixtureRequest) -> Side:
    return Side(lends=request.param)


def _received(registration_id: RegistrationId) -> Received:
    return Received(registration_id, 40, SIZE, 0.5)


def _failed(registration_id: RegistrationId, quiet: bool) -> ReceiveFailed:
    return ReceiveFailed(registration_id, FailureKind.REFUSED, "refused", quiet)


def test_a_request_asks_for_what_it_lacks(side: Side) -> None:
    side.arrive()
    assert side.commands() == [Watch(T, HERE)]
    assert side.side.matched(side.name, 0) == 40
    assert side.side.matched(side.name, 16) == 24
    assert side.side.matched(RequestId("other"), 0) == 0


def test_blocks_and_positions_are_registered_in_the_step_that_allocates(
    side: Side,
) -> None:
    side.park(computed=16)
    wanted = side.receive.complete()
    digest = prompt_digest(side.request.prompt_token_ids)
    assert wanted.want == Want(40, 16, 24, digest, BLOCK)
    assert wanted.blocks[0].tolist() == side.held.get_block_ids()[0][1:]
    assert (wanted.transfer_id, wanted.timeout) == (T, TIMEOUT)
    assert side.receive.address == HERE
    assert side.pins.counts()["exposed_for_receive"] == 2
    assert side.side.matched(side.name, 0) == 0


def test_received_kv_completes_the_request_once(side: Side) -> None:
    registration_id = side.park()
    side.loads.received(0, _received(registration_id))
    assert side.loads.completions_due
    assert side.complete() == {side.name}
    assert side.complete() == set()
    side.loads.received(0, _received(registration_id))
    assert side.complete() == set()
    side.end()
    assert side.over()
    last = side.last()
    assert (last["outcome"], last["tokens"], last["bytes"]) == ("received", 40, 1000)


def test_every_rank_must_have_received() -> None:
    side = Side(world_size=2)
    registration_id = side.park()
    side.loads.received(1, _received(registration_id))
    assert side.complete() == set()
    side.loads.received(0, _received(registration_id))
    assert side.complete() == {side.name}
    side.end()
    assert side.over()
    assert side.last()["bytes"] == 2000


@pytest.mark.parametrize("quiet", [True, False])
def test_a_failure_is_ordered_and_told_once(side: Side, quiet: bool) -> None:
    registration_id = side.park()
    side.loads.failed(0, _failed(registration_id, quiet))
    assert side.failing() == {side.name}
    assert side.failing() == set()
    assert side.complete({side.name}) == set()
    # The engine takes the request apart, or computes it here.
    side.end()
    held = side.pins.counts()["quiescing"]
    assert held == (0 if quiet else 3)
    if not quiet:
        assert available(side.pool) == BLOCKS - 4
        side.loads.quiet(0, ReceiveQuiet(registration_id))
    assert side.over()
    last = side.last()
    assert (last["outcome"], last["cause"], last["tokens"]) == ("failed", "refused", 0)
    taken = side.stats.take()
    assert taken is not None
    assert taken.reduce()["Num failed hand-offs"] == 1


def test_a_rank_that_fails_stops_the_others() -> None:
    side = Side(world_size=2)
    registration_id = side.park()
    side.loads.failed(0, _failed(registration_id, True))
    assert side.orders == [CancelReceive(registration_id, "refused")]
    assert side.failing() == {side.name}
    side.complete({side.name})
    side.end()
    assert not side.over()
    side.loads.failed(1, _failed(registration_id, False))
    assert side.failing() == set()
    side.loads.quiet(1, ReceiveQuiet(registration_id))
    assert side.over()


def test_an_abort_frees_the_request_at_once_and_its_blocks_on_proof(
    side: Side,
) -> None:
    registration_id = side.park()
    side.end(ABORTED)
    (cancel,) = side.commands()
    assert isinstance(cancel, CancelReceive)
    assert cancel.registration_id == registration_id
    assert side.complete() == {side.name}
    assert available(side.pool) == BLOCKS - 4
    assert side.pins.counts()["quiescing"] == 3
    side.loads.failed(0, _failed(registration_id, False))
    assert side.failing() == set()
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    assert side.complete() == set()
    assert side.over()
    assert side.last()["outcome"] == "aborted"


def test_an_abort_that_meets_the_kv_on_its_way(side: Side) -> None:
    registration_id = side.park()
    side.end(ABORTED)
    side.loads.received(0, _received(registration_id))
    side.loads.quiet(0, ReceiveQuiet(registration_id))
    assert side.complete() == {side.name}
    assert side.over()


def test_an_abort_before_the_failure_is_told(side: Side) -> None:
    registration_id = side.park()
    side.loads.failed(0, _failed(registration_id, True))
    side.end(ABORTED)
    assert side.failing() == set()
    assert side.complete() == {side.name}
    assert side.over()


def test_an_abort_while_the_failure_is_on_its_way(side: Side) -> None:
    registration_id = side.park()
    side.loads.failed(0, _failed(registration_id, True))
    assert side.failing() == {side.name}
    side.end(ABORTED)
    assert side.complete({side.name}) == set()
    assert side.over()


def test_a_cached_prompt_is_not_needed(side: Side) -> None:
    side.arrive()
    assert side.side.matched(side.name, 39) == 0
    assert side.side.matched(side.name, 32) == 8
    side.held = allocate(side.pool, 3)
    side.side.allocated(side.name, side.held, 0, 0)
    assert side.commands() == [
        Watch(T, HERE),
        Unwatch(T),
        TellNotNeeded(T, HERE, receivers=1),
    ]
    side.end()
    assert side.over()
    assert side.last()["outcome"] == "not_needed"


def test_a_second_allocation_asks_for_nothing(side: Side) -> None:
    registration_id = side.park()
    side.side.allocated(side.name, side.held, 0, 1)
    assert side.commands() == []
    side.loads.received(0, _received(registration_id))
    side.complete()
    side.side.allocated(side.name, side.held, 40, 2)
    assert side.commands() == []
    side.end()
    assert side.over()


def test_an_abort_in_the_queue_tells_the_prefill_engine(side: Side) -> None:
    side.arrive()
    side.side.finished(finish(side.request, ABORTED))
    assert side.commands()[1:] == [Unwatch(T), TellNotNeeded(T, HERE, receivers=1)]
    assert side.over()


def test_a_request_that_never_ran_releases_all_its_children() -> None:
    side = Side()
    side.request = request("r-12345678", tokens=1)
    side.request.prompt_token_ids = [0]
    side.arrive()
    side.side.finished(finish(side.request, ABORTED))
    assert side.commands()[-1] == TellNotNeeded(T, HERE, receivers=0)


@pytest.mark.parametrize(
    ("mode", "params", "expected"),
    [
        (Mode.PUSH, PARAMS, "t"),
        (Mode.PULL, DecodeParams(None, RequestId("p-1"), PARAMS.address), "p-1"),
        (Mode.PUSH, DecodeParams(None, RequestId("p-1"), PARAMS.address), "r"),
        (Mode.PULL, DecodeParams(None, None, PARAMS.address), "r"),
    ],
)
def test_the_name_of_the_hand_off(
    mode: Mode, params: DecodeParams, expected: str
) -> None:
    side = Side(mode=mode)
    side.arrive(params)
    (watch,) = side.commands()
    assert isinstance(watch, Watch)
    assert watch.transfer_id == expected


def test_reports_about_unknown_attempts_are_nothing(side: Side) -> None:
    stranger = RegistrationId("stranger")
    side.loads.received(0, _received(stranger))
    side.loads.failed(0, _failed(stranger, True))
    side.loads.quiet(0, ReceiveQuiet(stranger))
    assert side.complete({"stranger"}) == set()
    assert side.over()


def test_a_quarantine_is_logged_once(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        f"{Loads.__module__}.logger.warning",
        lambda text, *args: said.append(text % args),
    )
    registration_id = side.park()
    side.loads.failed(0, _failed(registration_id, False))
    said.clear()
    now = time.monotonic()
    side.loads.warn_of_quarantine(now)
    assert said == []
    assert side.loads.release_due(now)
    for later in (1, 2):
        side.loads.warn_of_quarantine(now + later * QUARANTINE_LOG_SECONDS + 1)
    (text,) = said
    assert not side.loads.release_due(now + 3 * QUARANTINE_LOG_SECONDS)
    assert "3 blocks" in text
    assert "127.0.0.1:5600" in text
    assert side.pins.counts()[PinState.QUIESCING] == 3


# ---- where the KV is said to lie

SAID = Whereabouts(7, ((5, 6, 9),))


def _parked(params: DecodeParams, mode: Mode = Mode.PULL, computed: int = 0) -> Side:
    side = Side(mode=mode)
    side.side.new_request(side.request, params)
    external = side.side.matched(side.name, computed)
    side.held = allocate(side.pool, 3)
    side.side.allocated(side.name, side.held, external, 0)
    return side


def _hint(side: Side) -> tuple[int, list[int]] | None:
    (receive,) = (order for order in side.orders if isinstance(order, Receive))
    hint = receive.request.hint
    if hint is None:
        return None
    (blocks,) = hint.blocks
    assert blocks.dtype == np.int32
    return hint.generation, blocks.tolist()


@pytest.mark.parametrize(("computed", "blocks"), [(0, [5, 6, 9]), (16, [6, 9])])
def test_what_is_said_of_the_wanted_blocks_is_a_hint(
    computed: int, blocks: list[int]
) -> None:
    side = _parked(replace(PARAMS, whereabouts=SAID), computed=computed)
    assert _hint(side) == (7, blocks)


@pytest.mark.parametrize(
    "said",
    [
        None,
        Whereabouts(7, ((5, 6),)),
        Whereabouts(7, ((5, 6, 9), (1, 2, 3))),
        Whereabouts(7, ((5, 6, 9, 4),)),
    ],
)
def test_without_a_block_for_each_position_of_one_group_there_is_no_hint(
    said: Whereabouts | None,
) -> None:
    assert _hint(_parked(replace(PARAMS, whereabouts=said))) is None


def test_what_is_written_needs_no_hint() -> None:
    params = replace(PARAMS, whereabouts=SAID)
    assert _hint(_parked(params, mode=Mode.PUSH)) is None
