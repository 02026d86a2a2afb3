# SPDX-License-Identifier: Apache-2.0
"""Later turns in the engine's own scheduler; only the workers are played here."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import cache_config, prompt
from v1.kv_connector.unit.nixl.engine_side import BLOCK, BLOCKS, available
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    CancelReceive,
    Keep,
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
    Receive,
    Retire,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Event,
    FailureKind,
    Offer,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.role import (
    NixlScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

pytestmark = pytest.mark.timeout(120)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 10000,
    "max_position_embeddings": 4096,
}
TOTAL = BLOCKS - 1
SIZE = TransferSize(1, 1)
TOKEN = 7
"""What every step samples."""


class Engine:
    """A scheduler, and what its workers answer to orders."""

    def __init__(self, folder: Path, **extra: Any) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = BLOCKS
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder),
                skip_tokenizer_init=True,
                max_model_len=1024,
                dtype="float32",
                enforce_eager=True,
            ),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlPushConnector",
                kv_role="kv_both",
                engine_id="engine",
                kv_connector_extra_config={"bidirectional_kv_xfer": True, **extra},
            ),
        )
        init_none_hash(sha256)
        self.scheduler = Scheduler(
            config, cache_config(), StructuredOutputManager(config), BLOCK
        )
        connector = self.scheduler.connector
        assert connector is not None
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): NixlHandshakeMetadata(encode(HERE))}
        )
        self.connector = connector
        self.address = ("", 0)
        self.role: NixlScheduler = connector._scheduler
        self.receives: list[Receive] = []
        self.keeps: list[Keep] = []
        self.offers: list[Offer] = []
        self.results: dict[str, dict[str, Any] | None] = {}
        self.scheduled: dict[str, int] = {}
        self.closes = True
        self._due: list[Event] = []

    def add(
        self,
        name: str,
        tokens: list[int],
        answer: int = 1,
        params: dict[str, Any] | None = None,
    ) -> Request:
        request = prompt(name, tokens, params, ignore_eos=True)
        request.max_tokens = answer
        self.scheduler.add_request(request)
        return request

    def step(self, *events: Event) -> None:
        """One engine step; the ranks' words on the last one come with it."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, NixlConnectorMetadata)
        reports = [*self._due, *events]
        self._due = []
        self.offers += metadata.offers
        for command in metadata.commands:
            match command:
                case Receive():
                    self.receives.append(command)
                case Keep():
                    self.keeps.append(command)
                case Retire() if self.closes:
                    self._due.append(_closed(command.name))
                case CancelReceive():
                    self._due.append(ReceiveQuiet(command.registration_id))
                case _:
                    pass
        for name, count in output.num_scheduled_tokens.items():
            self.scheduled[name] = self.scheduled.get(name, 0) + count
        names = list(output.num_scheduled_tokens)
        outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                [self._sampled(name) for name in names],
                kv_connector_output=KVConnectorOutput(
                    failed_recving=set(metadata.report_failed),
                    kv_connector_worker_meta=NixlWorkerMetadata(
                        [RankReport(0, tuple(reports), {})]
                    ),
                ),
            ),
        )
        for group in outputs.values():
            for one in group.outputs:
                if one.finished:
                    self.results[one.request_id] = one.kv_transfer_params

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            self.step()

    def finish(self, *requests: Request) -> None:
        self.until(lambda: all(request.is_finished() for request in requests))

    def turn(
        self, name: str, tokens: list[int], answer: int = 2, **params: Any
    ) -> None:
        """A decode leg, whose hand-off fails to matter: all is computed here."""
        sent = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            **params,
        }
        request = self.add(f"d-{name}", tokens, answer, sent)
        self.until(lambda: self.receives)
        wanted = self.receives.pop().complete()
        event = Received(wanted.registration_id, wanted.want.num_tokens, SIZE, 0.1)
        self.step(event)
        self.finish(request)

    def lookup(self, name: str) -> tuple[Kept, ...]:
        return self.role.lookup(TransferId(name))

    def free(self) -> int:
        return available(self.scheduler.kv_cache_manager.block_pool)

    def settle(self) -> None:
        """Nothing is left once all that is kept has gone."""
        self.role.reset_cache()
        self.closes = True
        for keep in self.keeps:
            self._due.append(_closed(keep.offer.transfer_id))
        for _ in range(3):
            self.step()
        document = self.role.integrity()
        assert self.free() == TOTAL
        assert isinstance(document["pins"], dict)
        assert isinstance(document["tables"], dict)
        assert not any((*document["pins"].values(), *document["tables"].values()))
        assert not self.scheduler.requests

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        return [TOKEN] if request.num_computed_tokens >= request.num_tokens else []


def _closed(name: TransferId) -> SenderClosed:
    return SenderClosed(name, 1, CloseReason.RELEASED, 0, SIZE, 1.0)


def _tokens(blocks: int, first: int = 1000) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Engine] = []

    def make(**extra: Any) -> Engine:
        host, port = free_address()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        folder = tmp_path / str(len(made))
        folder.mkdir()
        engine = Engine(folder, retention_watermark=0.0, **extra)
        engine.address = (host, port)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.settle()
        engine.connector.shutdown()


# ---- the decode side


def test_a_conversation_leaves_its_computed_tokens(make: Make) -> None:
    d = make()
    d.turn("t1", _tokens(2), answer=5)
    (kept,) = d.lookup("t1")
    assert kept.num_tokens == 2 * BLOCK + 4
    result = d.results["d-t1"]
    assert result is not None
    assert result["remote_num_tokens"] == kept.num_tokens


def test_a_growing_request_is_not_preempted_for_what_is_kept(make: Make) -> None:
    """Whether or not somebody has learnt the names of what is kept."""
    d = make()
    for index in range(4):
        d.turn(f"t{index}", _tokens(2, 2000 * index))
    for index in range(2):
        assert d.lookup(f"t{index}")
    running = [d.add(f"r{index}", _tokens(7, 10000 * index), 60) for index in (1, 2)]
    d.until(lambda: all(r.num_output_tokens > 1 for r in running))
    d.finish(*running)
    assert [request.num_preemptions for request in running] == [0, 0]
    assert any(not d.lookup(f"t{index}") for index in range(4))


def test_a_large_request_takes_what_it_needs(make: Make) -> None:
    d = make()
    for index in range(5):
        d.turn(f"t{index}", _tokens(2, 2000 * index))
        d.lookup(f"t{index}")
    large = d.add("large", _tokens(26, 50000), 3)
    d.finish(large)
    assert large.num_preemptions == 0


def test_a_waiting_request_is_not_starved_by_its_own_cached_prefix(make: Make) -> None:
    d = make()
    history = _tokens(14)
    d.finish(d.add("first", history))
    d.turn("t1", _tokens(9, 9000))
    longer = d.add("longer", [*history, *_tokens(9, 5000)], 2)
    d.finish(longer)
    assert longer.num_preemptions == 0


def test_readers_that_take_long_are_waited_for_a_bounded_time(make: Make) -> None:
    d = make()
    d.turn("t1", _tokens(14))
    d.lookup("t1")
    d.closes = False
    running = [d.add(f"r{index}", _tokens(7, 9000 * index), 40) for index in (1, 2)]
    # One of them goes on at the cost of the other, whoever reads.
    d.finish(*running)
    assert sum(request.num_preemptions for request in running) > 0


def test_the_cache_can_be_reset(make: Make) -> None:
    d = make()
    d.turn("t1", _tokens(3))
    assert d.scheduler.reset_prefix_cache(reset_connector=True)
    assert d.free() == TOTAL
    d.turn("t2", _tokens(3))
    d.lookup("t2")
    assert not d.scheduler.reset_prefix_cache(reset_connector=True)
    d.step()
    d.step()
    assert d.scheduler.reset_prefix_cache(reset_connector=True)


def test_an_idle_engine_that_keeps_wants_no_steps(make: Make) -> None:
    d = make()
    d.turn("t1", _tokens(3))
    d.step()
    assert d.lookup("t1")
    assert not d.scheduler.has_requests()


# ---- the prefill side


class Next:
    """The prefill leg of a second turn, parked under its READ."""

    def __init__(self, make: Make) -> None:
        self.d, self.p = (
            make(),
            make(kv_recompute_threshold=BLOCK, retention_lookup_timeout=20.0),
        )
        history = _tokens(5)
        self.d.turn("t1", history, answer=10)
        self.shared = len(history) + 9
        self.tokens = [*history, *([TOKEN] * 9), *_tokens(1, 9000)]
        host, port = self.d.address
        self.request = self.p.add(
            "p",
            self.tokens,
            1,
            {
                "do_remote_decode": True,
                "transfer_id": "t2",
                "num_receivers": 1,
                "retained_transfer_id": "t1",
                "remote_host": host,
                "remote_port": port,
            },
        )
        self.p.until(lambda: self.p.receives)
        self.registration_id = self.p.receives[0].request.registration_id
        assert self.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def fail(self, quiet: bool) -> ReceiveFailed:
        return ReceiveFailed(self.registration_id, FailureKind.LEASE, "gone", quiet)

    def finish(self, outcome: str) -> None:
        self.p.finish(self.request)
        assert self.request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert self.request.num_preemptions == 0
        self.end(outcome)

    def end(self, outcome: str) -> None:
        # Nobody takes the hand-off of this turn.
        self.p.step(
            *(
                SenderClosed(
                    offer.transfer_id,
                    offer.generation,
                    CloseReason.EXPIRED,
                    0,
                    SIZE,
                    1.0,
                )
                for offer in self.p.offers
            )
        )
        (record,) = [r for r in self.p.role.handoffs() if r["role"] == "reader"]
        assert record["outcome"] == outcome
        assert self.p.role.integrity()["free_blocks"] == TOTAL

    def others_run(self) -> None:
        """Other requests run meanwhile."""
        other = self.p.add("other", _tokens(2, 30000), 3)
        self.p.finish(other)


def test_only_what_is_new_is_computed(make: Make) -> None:
    turn = Next(make)
    turn.others_run()
    turn.p.step(Received(turn.registration_id, turn.shared, SIZE, 0.1))
    turn.finish("read")
    assert turn.p.scheduled["p"] == len(turn.tokens) - turn.shared


@pytest.mark.parametrize("quiet", [True, False])
def test_a_failed_read_is_computed_whatever_the_policy(make: Make, quiet: bool) -> None:
    turn = Next(make)
    turn.others_run()
    assert not turn.p.scheduler.recompute_kv_load_failures
    turn.p.step(turn.fail(quiet))
    turn.p.finish(turn.request)
    assert turn.p.scheduled["p"] == len(turn.tokens)
    if not quiet:
        held = turn.p.role.integrity()["pins"]
        assert isinstance(held, dict)
        assert held["quiescing"] == -(-turn.shared // BLOCK)
        turn.p.step(ReceiveQuiet(turn.registration_id))
    turn.finish("recomputed")


def test_an_abort_under_the_read(make: Make) -> None:
    turn = Next(make)
    turn.p.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    turn.p.step()
    turn.p.step()
    turn.end("aborted")


def test_an_abort_in_the_step_after_the_failure(make: Make) -> None:
    turn = Next(make)
    turn.p.step(turn.fail(True))
    turn.p.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    turn.p.step()
    turn.p.step()
    turn.end("recomputed")


def test_a_failure_where_there_is_no_room_to_compute(make: Make) -> None:
    """The blocks that the READ may still fill are missing for a while."""
    turn = Next(make)
    turn.p.step(turn.fail(False))
    other = turn.p.add("other", _tokens(23, 30000), 2)
    for _ in range(5):
        turn.p.step()
    turn.p.step(ReceiveQuiet(turn.registration_id))
    turn.p.finish(other)
    turn.p.finish(turn.request)
    turn.end("recomputed")
