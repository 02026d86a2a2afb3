# SPDX-License-Identifier: Apache-2.0
"""The worker role: what the forward thread does, and what it leaves to the other."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    LAYERS,
    NUM_BLOCKS,
    PAGE_BYTES,
    NoReports,
    free_address,
    offer,
    request,
)
from v1.kv_connector.unit.nixl.fake_device import FakeDevice
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import nixl_utils
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Agent, AgentError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Expect,
    NixlConnectorMetadata,
    Receive,
    Watch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    Offer,
    Received,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    EngineId,
    Mode,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.memory import KvMemory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_thread import (
    TransferThread,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import idling, role
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker.role import NixlWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

pytestmark = pytest.mark.timeout(90)

PATIENCE_S = 20.0
LEASE_S = 4.0
CONFIG = ConnectorConfig(
    num_threads=0, kv_lease_duration=LEASE_S, peer_timeout=8.0, handshake_timeout=5.0
)
T = TransferId("t")
HERE, THERE = np.array([9, 8, 3], np.int32), np.array([20, 21, 7], np.int32)


class _Recorder:
    """NIXL's agent, with the threads that have used it."""

    def __init__(self, agent: Any, callers: set[int]) -> None:
        self._agent = agent
        self._callers = callers

    def __getattr__(self, name: str) -> Any:
        self._callers.add(threading.get_ident())
        return getattr(self._agent, name)


class Watched(Agent):
    """Knows who calls it, and waits in posting when it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = kwargs
        self.callers: set[int] = set()
        self.posting = threading.Event()
        self.may_post = threading.Event()
        self.may_post.set()
        self._agent = _Recorder(self._agent, self.callers)

    def post(self, *args: Any) -> Any:
        self.posting.set()
        assert self.may_post.wait(PATIENCE_S), "nobody goes on while this posts"
        return super().post(*args)


class WatchedWorker(NixlWorker):
    agent_class = Watched


class Engine:
    """A worker with its cache and side channel; this is its forward thread."""

    def __init__(
        self, name: str, mode: Mode, settings: ConnectorConfig = CONFIG
    ) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        layers = [f"layer{index}" for index in range(LAYERS)]
        config = VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlPushConnector", kv_role="kv_both", engine_id=name
            )
        )
        config.cache_config.block_size = BLOCK_TOKENS
        cache = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        )
        self.caches = {
            layer: torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8)
            for layer in layers
        }
        self.worker = WatchedWorker(config, cache, EngineId(name), settings, mode)
        self.worker.register_kv_caches(self.caches)
        self.address = free_address()
        described = self.worker.handshake_metadata().rank_info
        self._server = SideChannelServer(self.address, [described], NoReports())
        self.events: list[Event] = []
        self.tables: dict[str, int] = {}

    @property
    def thread(self) -> TransferThread:
        assert isinstance(self.worker._thread, TransferThread)
        return self.worker._thread

    @property
    def agent(self) -> Watched:
        agent = self.thread.loop._agent
        assert isinstance(agent, Watched)
        return agent

    def begin(self, *commands: Command, offers: tuple[Offer, ...] = ()) -> None:
        """A step up to its forward pass."""
        self._step = NixlConnectorMetadata(commands, offers)
        self.worker.begin_step(self._step)

    def end(self) -> None:
        """The step's forward pass and what follows it."""
        self.worker.end_forward(self._step)
        assert self.worker.transfer_results().failed_recving == set()
        told = self.worker.worker_metadata()
        for report in () if told is None else told.reports:
            self.events += report.events
            self.tables = report.tables

    def step(self, *commands: Command, offers: tuple[Offer, ...] = ()) -> None:
        self.begin(*commands, offers=offers)
        self.end()

    def idle_step(self) -> None:
        """A step without a forward pass."""
        self._step = NixlConnectorMetadata(computes=False)
        self.worker.begin_step(self._step)
        self.end()

    def has(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def filled(self, blocks: np.ndarray[Any, Any], value: int) -> bool:
        index = torch.from_numpy(blocks).long()
        return all(bool((c[index] == value).all()) for c in self.caches.values())

    def fill(self, value: int) -> None:
        for cache in self.caches.values():
            cache.fill_(value)

    def close(self) -> None:
        self._server.close()
        self.worker.shutdown()


class Pair:
    def __init__(self, mode: Mode) -> None:
        self.p, self.d = Engine("prefill", mode), Engine("decode", mode)
        self.mover = self.p if mode is Mode.PUSH else self.d
        self.p.fill(42)
        self.given = (offer(T, HERE).offer,)
        self.wanted = Receive(request(T, THERE, mode), self.p.address)

    def until(self, condition: Callable[[], bool], *stepping: Engine) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            tables = [engine.tables for engine in (self.p, self.d)]
            assert time.monotonic() < deadline, f"not so in time: {tables}"
            for engine in stepping or (self.p, self.d):
                engine.step()
            time.sleep(0.002)

    def finish(self) -> None:
        self.until(lambda: self.d.has(Received) and self.p.has(SenderClosed))
        assert self.d.filled(THERE, 42)

    def close(self) -> None:
        self.d.close()
        self.p.close()


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine around a worker would tell it."""
    monkeypatch.setattr(role, "get_tensor_model_parallel_rank", lambda: 0)
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(role, "get_pp_group", lambda: group)
    for facts in ("compat_facts", "layout_facts"):
        monkeypatch.setattr(role, facts, lambda *_: {})


@pytest.fixture(params=Mode)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def push() -> Iterator[Pair]:
    pair = Pair(Mode.PUSH)
    yield pair
    pair.close()


def test_the_transfer_thread_alone_uses_nixl(pair: Pair) -> None:
    agents = (pair.p.agent, pair.d.agent)
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    pair.d.step(pair.wanted)
    pair.finish()
    for engine in (pair.p, pair.d):
        engine.worker.stats()
    pair.close()
    for agent in agents:
        (caller,) = agent.callers
        assert caller != threading.get_ident()


def test_a_long_post_holds_up_no_step(pair: Pair) -> None:
    agent = pair.mover.agent
    agent.may_post.clear()
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    pair.d.step(pair.wanted)
    pair.until(agent.posting.is_set)

    for number in range(20):
        watch = Watch(TransferId(f"w{number}"), pair.p.address)
        pair.d.step(watch)
        pair.p.step(Expect(TransferId(f"e{number}"), 1, ()))
    assert not pair.d.has(Received)

    agent.may_post.set()
    pair.finish()


def test_orders_are_under_way_before_the_forward_pass(pair: Pair) -> None:
    pair.d.begin(pair.wanted)
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1, pair.p)
    pair.d.end()
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    pair.finish()


def test_kv_is_offered_in_the_step_that_computes_it_and_not_before(pair: Pair) -> None:
    pair.d.step(pair.wanted)
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)

    pair.p.begin(Expect(T, 1, ()), offers=pair.given)
    end = time.monotonic() + 0.5
    pair.until(lambda: time.monotonic() > end, pair.d)
    assert pair.d.filled(THERE, 0)

    pair.p.worker.end_forward(pair.p._step)
    pair.until(lambda: pair.d.has(Received), pair.d)
    assert pair.d.filled(THERE, 42)


def test_a_group_of_layers_moves_while_the_step_computes_the_rest(push: Pair) -> None:
    grouped = replace(CONFIG, push_layer_groups=LAYERS)
    source = Engine("grouped", Mode.PUSH, grouped)
    source.fill(42)
    wanted = Receive(request(T, THERE, Mode.PUSH), source.address)
    push.d.step(wanted)
    push.until(lambda: source.tables.get("sender_claims") == 1, push.d, source)

    first, *_, last = source.caches
    source.begin(Expect(T, 1, ()), offers=push.given)
    source.worker.layer_computed(first)

    def has_come(layer: str) -> bool:
        return bool((push.d.caches[layer][THERE] == 42).all())

    push.until(lambda: has_come(first), push.d)
    assert not has_come(last)
    assert not push.d.has(Received)
    source.end()
    push.until(
        lambda: push.d.has(Received) and source.has(SenderClosed), push.d, source
    )
    assert push.d.filled(THERE, 42)
    source.close()


class _StreamEvent:
    """An event on a stream that the test moves on."""

    recorded: ClassVar[list["_StreamEvent"]] = []

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.passed = False

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.passed


def test_kv_moves_when_the_event_behind_its_computation_has_passed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.p.worker, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch, "Event", _StreamEvent)
    monkeypatch.setattr(_StreamEvent, "recorded", [])
    pair.d.step(pair.wanted)
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    (event,) = _StreamEvent.recorded

    end = time.monotonic() + 0.3
    pair.until(lambda: time.monotonic() > end)
    assert pair.p.tables["pending_offers"] == 1
    assert pair.d.filled(THERE, 0)

    event.passed = True
    pair.finish()


def test_the_transfer_thread_copies_to_and_from_a_buffer_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caches are another device's, as far as the worker can tell."""
    device, callers = FakeDevice(), set[int]()

    def copy(*args: Any) -> None:
        callers.add(threading.get_ident())
        device.copy(*args)

    staged = KvMemory("DRAM", staged=True)
    monkeypatch.setattr(role, "kv_memory", lambda *_: staged)
    pair = Pair(Mode.PUSH)
    for engine in (pair.p, pair.d):
        buffer = engine.worker._buffer
        assert buffer is not None
        monkeypatch.setattr(buffer, "_record", device.record)
        monkeypatch.setattr(buffer, "_stream", device.stream)
        engine.worker.use_copy_operation(copy)
    pair.d.step(pair.wanted)
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    pair.finish()
    assert {way for way, *_ in device.copied} == {"d2h", "h2d"}
    threads = {e.thread._thread.ident for e in (pair.p, pair.d)}
    assert callers == threads
    pair.close()


def test_what_happens_in_a_step_is_told_with_that_step(push: Pair) -> None:
    push.d.step(push.wanted)
    push.until(lambda: push.p.tables.get("sender_claims") == 1)
    push.d.begin()
    outbox = push.d.thread._outbox

    def landed() -> bool:
        facts = outbox._facts
        return facts is not None and any(isinstance(e, Received) for e in facts.events)

    push.p.step(Expect(T, 1, ()), offers=push.given)
    push.until(landed, push.p)
    push.d.end()
    assert push.d.has(Received)


def test_a_step_that_computes_nothing_waits_for_news(
    push: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idling, "WAIT_SECONDS", (PATIENCE_S, PATIENCE_S))
    push.d.step(push.wanted)
    push.p.step(Expect(T, 1, ()), offers=push.given)
    began = time.monotonic()
    while not push.d.has(Received):
        push.d.idle_step()
    assert time.monotonic() - began < PATIENCE_S
    assert push.d.filled(THERE, 42)

    monkeypatch.setattr(idling, "WAIT_SECONDS", (0.05, 0.05))
    began = time.monotonic()
    push.d.step()
    busy = time.monotonic() - began
    push.d.idle_step()
    assert time.monotonic() - began - busy >= 0.05


def test_a_waiting_request_is_kept_alive_without_steps(push: Pair) -> None:
    push.d.step(Watch(T, push.p.address))
    push.p.step(Expect(T, 1, ()), offers=push.given)
    end = time.monotonic() + 1.5 * LEASE_S
    push.until(lambda: time.monotonic() > end, push.p)
    assert not push.p.has(SenderClosed)
    push.d.step(push.wanted)
    push.finish()


def test_a_turn_that_fails_is_not_the_last(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def failing_once(poll: Callable[[float], Any]) -> Callable[[float], Any]:
        def fail(now: float) -> Any:
            monkeypatch.undo()
            failed.append(threading.get_ident())
            raise RuntimeError("a defect")

        return fail

    connections = pair.d.thread.loop._connections
    monkeypatch.setattr(connections, "poll", failing_once(connections.poll))
    pair.p.step(Expect(T, 1, ()), offers=pair.given)
    pair.d.step(pair.wanted)
    pair.finish()
    assert len(failed) == 1
    assert pair.d.thread.alive


def test_no_thread_is_bound_to_a_core_or_polls_without_pause() -> None:
    cores = os.sched_getaffinity(0)
    engine = Engine("engine", Mode.PUSH)
    transfers = engine.thread._thread.native_id
    assert transfers is not None
    assert os.sched_getaffinity(0) == os.sched_getaffinity(transfers) == cores
    assert engine.agent.options["progress_thread"] is False
    engine.close()


def test_the_backends_are_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        role.logger, "info", lambda text, *args: said.append(text % args)
    )
    Engine("named", Mode.PUSH).close()
    assert any("backends UCX" in text for text in said), said


def test_a_backend_without_a_plugin_is_named() -> None:
    with pytest.raises(AgentError, match=r"\['NO_SUCH'\] could not be created.*UCX"):
        Agent(AgentName("agent"), ["UCX", "NO_SUCH"], 0, False)


def test_a_backend_whose_plugin_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(*_: Any) -> None:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    monkeypatch.setattr(nixl_utils.NixlWrapper, "__init__", cannot)
    said = r"\['LIBFABRIC'\] could not be created: .*NOT_FOUND.*NIXL_LOG_LEVEL"
    with pytest.raises(AgentError, match=said):
        Agent(AgentName("agent"), ["LIBFABRIC"], 0, False)
