# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation through the connectors of two engines."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import Cache, cache_config, prompt
from v1.kv_connector.unit.nixl.engine_side import (
    ABORTED,
    BLOCK,
    BLOCKS,
    LENGTH,
    STOPPED,
    finish,
    step,
)
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Keep,
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
    Receive,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Event,
    FailureKind,
    Received,
    ReceiveFailed,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import query
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    Found,
    GetIntegrity,
    Kept,
    Lookup,
    Release,
    Report,
    encode,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.timeout(90)

PROMPT = list(range(1000, 1000 + 3 * BLOCK))
ANSWER = list(range(500, 521))
HELD = -(-(len(PROMPT) + len(ANSWER) - 1) // BLOCK)
EXTRA = {
    "bidirectional_kv_xfer": True,
    "retention_watermark": 0.0,
    "retention_lookup_timeout": 20.0,
}


class Engine:
    """A connector's scheduler side, its cache manager and its side channel."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: type[NixlBaseConnector],
        **extra: Any,
    ) -> None:
        self.address = free_address()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", self.address[0])
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(self.address[1]))
        config = VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector=kind.__name__,
                kv_role="kv_both",
                engine_id="engine",
                kv_connector_extra_config={**EXTRA, **extra},
            )
        )
        config.cache_config.block_size = BLOCK
        self.cache = Cache()
        self.connector = kind(config, KVConnectorRole.SCHEDULER, cache_config())
        self.connector.bind_kv_cache_manager(self.cache.manager)
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): NixlHandshakeMetadata(encode(HERE))}
        )

    def arrive(
        self, name: str, tokens: list[int], params: dict[str, Any] | None, **more: Any
    ) -> Request:
        request = prompt(name, tokens, params, **more)
        self.connector.on_new_request(request)
        return request

    def matched(self, request: Request) -> int | None:
        _, computed = self.cache.cached(request)
        count, load = self.connector.get_num_new_matched_tokens(request, computed)
        assert load is bool(count)
        return count

    def admit(self, request: Request, seconds: float = 20.0) -> bool:
        """Try to schedule a waiting request until its answer is known."""
        end = time.monotonic() + seconds
        while (count := self.matched(request)) is None:
            assert time.monotonic() < end
            time.sleep(0.002)
        blocks = self.cache.admit(request, count)
        if blocks is None:
            return False
        self.connector.update_state_after_alloc(request, blocks, count)
        return True

    def end(self, request: Request, status: Any = STOPPED) -> dict[str, Any] | None:
        _, result = self.connector.request_finished(
            finish(request, status), self.cache.table(request)[0]
        )
        self.cache.manager.free(request)
        return result

    def orders(self) -> tuple[Command, ...]:
        metadata = self.connector.build_connector_meta(step())
        assert isinstance(metadata, NixlConnectorMetadata)
        return metadata.commands

    def report(self, *events: Event) -> set[str]:
        output = KVConnectorOutput(
            kv_connector_worker_meta=NixlWorkerMetadata([RankReport(0, events, {})])
        )
        self.connector.update_connector_output(output)
        return output.finished_recving or set()

    def lookup(self, turn: str) -> tuple[Kept, ...]:
        reply = query(self.address, Lookup(TransferId(turn)), 5)
        assert isinstance(reply, Found)
        return reply.kept

    def release(self, turn: str) -> object:
        reply = query(self.address, Release(TransferId(turn)), 5)
        assert isinstance(reply, Report)
        return json.loads(reply.json)

    def integrity(self) -> dict[str, Any]:
        reply = query(self.address, GetIntegrity(), 5)
        assert isinstance(reply, Report)
        document: dict[str, Any] = json.loads(reply.json)
        return document

    def retained(self) -> int:
        count: int = self.integrity()["pins"]["retained"]
        return count

    def over(self) -> bool:
        document = self.integrity()
        return self.cache.free() == BLOCKS - 1 and not any(
            (*document["tables"].values(), *document["pins"].values())
        )

    def settle(self) -> None:
        """The workers let go of all that they were told to."""
        for order in self.orders():
            if isinstance(order, Retire):
                self.report(_closed(order.name))

    def turn(
        self,
        name: str = "t1",
        tokens: list[int] | None = None,
        status: Any = STOPPED,
        answer: list[int] | None = None,
        **params: Any,
    ) -> dict[str, Any] | None:
        """A decode leg from its arrival to its end."""
        sent = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            **params,
        }
        request = self.arrive(f"d-{name}", tokens or PROMPT, sent)
        assert self.admit(request)
        for order in self.orders():
            if isinstance(order, Receive):
                size = TransferSize(1, 1)
                wanted = order.request
                self.report(
                    Received(wanted.registration_id, wanted.want.num_tokens, size, 0.1)
                )
        self.run(request, answer or ANSWER)
        return self.end(request, status)

    def run(self, request: Request, answer: list[int]) -> None:
        """Compute a parked or admitted request's prompt, and answer."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.cache.resume(request)
            missing = request.num_tokens - request.num_computed_tokens
            assert self.cache.manager.allocate_slots(request, missing) is not None
            request.num_computed_tokens = request.num_tokens
            request.status = RequestStatus.RUNNING
        self.cache.answer(request, answer)


def _closed(name: TransferId) -> SenderClosed:
    return SenderClosed(name, 1, CloseReason.RELEASED, 0, TransferSize(), 1.0)


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


def test_a_decode_leg_leaves_its_kv_behind(d: Engine) -> None:
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
        "remote_engine_id": "engine",
        "remote_request_id": "d-t1",
        "remote_host": d.address[0],
        "remote_port": d.address[1],
        "tp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
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
    ("status", "kept"), [(STOPPED, HELD), (LENGTH, HELD), (ABORTED, 0)]
)
def test_only_whole_answers_are_kept(d: Engine, status: Any, kept: int) -> None:
    result = d.turn(status=status)
    assert (result is not None) is bool(kept)
    assert d.retained() == kept


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
    d.turn("t2", release_transfer_id="t1", status=ABORTED)
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
    assert d.report(_closed(order.name)) == set()


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
