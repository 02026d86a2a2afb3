# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation through the connectors of two engines."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.engine_side import (
    ABORTED,
    BLOCK,
    BLOCKS,
    ERROR,
    LENGTH,
    STOPPED,
    step,
)
from v1.kv_connector.unit.nixl.turns_engine import (
    ANSWER,
    HELD,
    PROMPT,
    Engine,
    closed_by_rank,
    decode_leg,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Keep,
    NixlConnectorMetadata,
    Receive,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
    Received,
    ReceiveFailed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(params=Mode)
def kind(request: pytest.FixtureRequest) -> type[NixlBaseConnector]:
    return NixlPushConnector if request.param is Mode.PUSH else NixlPullConnector


@pytest.fixture
def d(
    monkeypatch: pytest.MonkeyPatch, kind: type[NixlBaseConnector]
) -> Iterator[Engine]:
    engine = Engine(monkeypatch, kind)
    yield engine
    engine.connector.shutdown()


@pytest.fixture
def p(
    monkeypatch: pytest.MonkeyPatch, kind: type[NixlBaseConnector]
) -> Iterator[Engine]:
    engine = Engine(monkeypatch, kind, kv_recompute_threshold=BLOCK)
    yield engine
    engine.connector.shutdown()


def test_a_decode_leg_leaves_its_kv_behind(
    d: Engine, kind: type[NixlBaseConnector]
) -> None:
    before = time.time()
    result = d.turn()
    assert result is not None
    tokens = len(PROMPT) + len(ANSWER) - 1
    expiry = result.pop("remote_blocks_expiry_time")
    assert before + 480 <= expiry <= time.time() + 480
    assert result == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "retained_transfer_id": "t1",
        "remote_block_ids": [[]],
        "remote_engine_id": "engine",
        "remote_request_id": "t1",
        "remote_host": d.address[0],
        "remote_port": d.address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "transfer_mode": "push" if kind is NixlPushConnector else "pull",
    }
    assert d.retained() == HELD
    (keep,) = (order for order in d.orders() if isinstance(order, Keep))
    (kept,) = d.lookup("t1")
    assert kept.name == keep.offer.transfer_id
    assert kept.num_tokens == keep.offer.prompt_tokens == tokens
    assert len(keep.offer.blocks[0]) == HELD
    assert kept.name not in json.dumps(result)


def test_only_what_is_computed_is_kept(d: Engine) -> None:
    result = d.turn(tokens=PROMPT, answer=[3])
    assert result is not None
    assert result["remote_num_tokens"] == len(PROMPT)
    assert d.retained() == 3


@pytest.mark.parametrize(("ahead", "kept"), [(-1, -2), (0, -1), (1, -1), (4, -1)])
def test_what_runs_ahead_of_the_answer_is_not_kept(
    d: Engine, ahead: int, kept: int
) -> None:
    """The engine counts tokens as computed that it has only scheduled."""
    request = d.arrive(
        "r",
        PROMPT,
        {
            "do_remote_prefill": True,
            "transfer_id": "t1",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        },
    )
    assert d.admit(request)
    d.run(request, ANSWER)
    request.num_computed_tokens = request.num_tokens - 1 + ahead
    result = d.end(request)
    assert result is not None
    assert result["remote_num_tokens"] == len(PROMPT) + len(ANSWER) + kept


@pytest.mark.parametrize(
    ("status", "kept"), [(STOPPED, HELD), (LENGTH, HELD), (ABORTED, HELD), (ERROR, 0)]
)
def test_only_whole_answers_are_kept(d: Engine, status: Any, kept: int) -> None:
    result = d.turn(status=status)
    assert (result is not None) is bool(kept)
    assert d.retained() == kept


def test_an_abort_before_the_answer_leaves_nothing(d: Engine) -> None:
    request = d.arrive("r", PROMPT, decode_leg("t1"))
    assert d.admit(request)
    d.end(request, ABORTED)
    assert d.retained() == 0


def test_an_abort_leaves_nothing_of_a_step_under_way(d: Engine) -> None:
    request = d.arrive("r", PROMPT, decode_leg("t1"))
    assert d.admit(request)
    d.run(request, ANSWER)
    request.num_in_flight_tokens = BLOCK
    d.end(request, ABORTED)
    (kept,) = d.lookup("t1")
    assert kept.num_tokens == request.num_computed_tokens - BLOCK


def test_a_leg_may_say_that_nothing_be_kept(d: Engine) -> None:
    assert d.turn(retain=False) is None
    assert d.retained() == 0
    assert d.over()


def test_a_request_without_a_hand_off_is_not_kept(d: Engine) -> None:
    request = d.arrive("plain", PROMPT, None)
    assert d.admit(request)
    d.run(request, ANSWER)
    assert d.end(request) is None
    assert d.over()


def test_without_the_setting_nothing_is_kept_or_asked(
    monkeypatch: pytest.MonkeyPatch, d: Engine, kind: type[NixlBaseConnector]
) -> None:
    d.turn()
    other = Engine(monkeypatch, kind, bidirectional_kv_xfer=False)
    assert other.turn() is None
    assert other.lookup("t1") == ()
    assert other.release("t1") == {"retained": False}
    request = other.arrive("p", PROMPT, _prefill(d))
    assert other.matched(request) == 0
    assert not other.connector.has_pending_block_frees()
    assert other.connector.reset_cache()
    other.connector.shutdown()


@pytest.mark.parametrize("retain", [True, False])
def test_a_turn_that_ends_well_releases_an_earlier_one(d: Engine, retain: bool) -> None:
    d.turn("t1")
    d.turn("t2", release_transfer_id="t1", status=ABORTED, retain=False)
    assert len(d.lookup("t1")) == 1
    d.turn("t3", release_transfer_id="t1", retain=retain)
    assert d.lookup("t1") == ()
    assert len(d.lookup("t3")) == retain
    d.settle()
    d.settle()
    assert d.retained() == (HELD if retain else 0)


def test_an_earlier_turn_that_is_unknown_is_released(d: Engine) -> None:
    assert d.turn("t2", release_transfer_id="t1") is not None


def test_a_release_over_the_side_channel(d: Engine) -> None:
    d.turn()
    assert d.release("t2") == {"retained": False}
    assert d.release("t1") == {"retained": True}
    assert d.retained() == HELD
    assert d.connector.has_pending_push_work()
    (order,) = (order for order in d.orders() if isinstance(order, Retire))
    assert d.retained() == 0
    assert d.over()
    assert d.report(closed_by_rank(order.name)) == set()


# ---- the prefill leg of the next turn


def _prefill(d: Engine, **more: Any) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "transfer_id": "t2",
        "retained_transfer_id": "t1",
        "remote_host": d.address[0],
        "remote_port": d.address[1],
        **more,
    }


NEXT = [*PROMPT, *ANSWER, *range(30)]
SHARED = len(PROMPT) + len(ANSWER) - 1


def _reader(engine: Engine) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        record
        for record in engine.connector._scheduler.handoffs()
        if record["role"] == "reader"
    ]
    return found


def test_the_next_turn_reads_what_is_kept(d: Engine, p: Engine) -> None:
    d.turn()
    request = p.arrive("p", NEXT, _prefill(d))
    assert p.admit(request)
    assert request.num_computed_tokens == SHARED
    (order,) = (order for order in p.orders() if isinstance(order, Receive))
    assert (order.address, order.request.mode) == (d.address, Mode.PULL)
    assert order.request.transfer_id == d.lookup("t1")[0].name
    size = TransferSize(1, 1)
    event = Received(order.request.registration_id, SHARED, size, 0.1)
    assert p.report(event) == {"p"}
    p.cache.resume(request)
    assert request.num_computed_tokens == SHARED
    assert [(r["outcome"], r["tokens"]) for r in _reader(p)] == [("read", SHARED)]
    d.connector._scheduler.release(TransferId("t1"))
    d.settle()
    assert d.over()


def test_the_dict_of_a_whole_answer_works_as_it_is(d: Engine, p: Engine) -> None:
    result = d.turn()
    request = p.arrive("p", NEXT, {**(result or {}), "transfer_id": "t2"})
    assert p.admit(request)
    assert request.num_computed_tokens == SHARED


def test_a_read_that_fails_is_no_error(d: Engine, p: Engine) -> None:
    d.turn()
    request = p.arrive("p", NEXT, _prefill(d))
    p.admit(request)
    (order,) = (order for order in p.orders() if isinstance(order, Receive))
    failed = ReceiveFailed(
        order.request.registration_id, FailureKind.LEASE, "let go", True
    )
    assert p.report(failed) == {"p"}
    metadata = p.connector.build_connector_meta(step())
    assert isinstance(metadata, NixlConnectorMetadata)
    assert metadata.report_failed == frozenset()
    assert request.num_computed_tokens == 0
    p.cache.resume(request)
    assert p.admit(request)
    assert request.status == RequestStatus.RUNNING
    assert request.num_computed_tokens == len(NEXT)
    assert [r["outcome"] for r in _reader(p)] == ["recomputed"]
    p.end(request, ABORTED)


def test_an_address_that_is_not_allowed_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, d: Engine, kind: type[NixlBaseConnector]
) -> None:
    d.turn()
    p = Engine(monkeypatch, kind, allowed_peers=["10.0.0.0/8"])
    request = p.arrive("p", NEXT, _prefill(d))
    assert p.matched(request) == 0
    p.connector.shutdown()


@pytest.mark.parametrize(
    "more",
    [
        {"retained_transfer_id": 7},
        {"retained_transfer_id": "kept-" + "0" * 32},
        {"remote_port": 0},
        {"remote_port": None},
        {"remote_host": ""},
        {"transfer_id": "kept-x"},
    ],
)
def test_what_cannot_be_used_is_computed(
    d: Engine, p: Engine, more: dict[str, Any]
) -> None:
    d.turn()
    request = p.arrive("p", NEXT, _prefill(d, **more))
    assert p.matched(request) == 0
    assert p.integrity()["counters"]["invalid_params"] == 1


# ---- giving way


def test_the_prefix_cache_can_be_reset(d: Engine) -> None:
    d.turn()
    assert d.cache.manager.reset_prefix_cache()
    assert d.cache.free() == BLOCKS - 1
    assert d.lookup("t1") == ()


def test_under_a_reader_a_reset_must_be_asked_for_again(d: Engine) -> None:
    d.turn()
    d.lookup("t1")
    assert not d.cache.manager.reset_prefix_cache()
    assert d.connector.reset_cache() is False
    d.settle()
    assert d.cache.manager.reset_prefix_cache()
    assert d.connector.reset_cache() is True


def test_a_waiting_request_gets_the_blocks(d: Engine) -> None:
    for index in range(3):
        d.turn(f"t{index}", tokens=[index, *PROMPT])
    assert d.cache.free() == BLOCKS - 1 - 3 * HELD
    large = d.arrive("large", list(range(5000, 5000 + 20 * BLOCK)), None)
    assert d.admit(large)
    assert len(d.lookup("t2")) == 1
    assert d.lookup("t0") == ()


def test_a_waiting_request_gets_the_blocks_that_hold_its_own_prefix(
    d: Engine,
) -> None:
    history = list(range(2000, 2000 + 14 * BLOCK))
    assert d.turn("own", tokens=history, answer=[3]) is not None
    other = d.arrive("other", list(range(9000, 9000 + 10 * BLOCK)), None)
    assert d.admit(other)
    # It needs seven blocks more than it finds cached, and as many are free.
    longer = d.arrive("longer", [*history, *range(7 * BLOCK)], None)
    assert d.admit(longer)
    d.end(other, ABORTED)
    d.end(longer, ABORTED)
    d.settle()
    assert d.over()


def test_a_waiting_request_is_not_starved_by_its_cached_prefix(d: Engine) -> None:
    history = list(range(2000, 2000 + 14 * BLOCK))
    first = d.arrive("first", history, None)
    assert d.admit(first)
    d.end(first)
    # Its blocks are free, and yet they are not room for the rest.
    assert d.turn("kept", tokens=list(range(9000, 9000 + 10 * BLOCK))) is not None
    longer = d.arrive("longer", [*history, *range(9 * BLOCK)], None)
    assert d.cache.cached(longer)[1] == 14 * BLOCK
    assert d.admit(longer)
    d.end(longer, ABORTED)
    d.settle()
    assert d.over()


def test_a_running_request_is_not_preempted_for_what_is_kept(d: Engine) -> None:
    d.turn()
    running = d.arrive("running", list(range(9000, 9000 + 26 * BLOCK)), None)
    assert d.cache.admit(running) is not None
    assert d.cache.free() == 0
    assert d.connector.has_pending_block_frees()
    assert d.cache.free() == HELD
    assert not d.connector.has_pending_block_frees()
    d.end(running, ABORTED)
    assert d.over()
