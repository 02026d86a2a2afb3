# SPDX-License-Identifier: Apache-2.0
"""The classes that the engine instantiates."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from v1.kv_connector.unit.nixl.engine_side import (
    ABORTED,
    BLOCK,
    BLOCKS,
    allocate,
    available,
    finish,
    manager,
    pool,
    request,
    step,
)
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlConnector,
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Expect,
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    RankReport,
    Receive,
    TellNotNeeded,
    Watch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    CloseReason,
    Received,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.pins import STEP_BLOCKS
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelFailure,
    query,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetFailure,
    GetHandoffs,
    GetIntegrity,
    GetRanks,
    Ranks,
    Report,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

pytestmark = pytest.mark.timeout(90)

PREFILL = {"do_remote_decode": True, "transfer_id": "t"}
DECODE = {
    "do_remote_prefill": True,
    "transfer_id": "u",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def _cache(groups: int = 1) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"l{i}"], spec) for i in range(groups)],
    )


def _make(
    kind: type[NixlBaseConnector] = NixlPushConnector,
    groups: int = 1,
    ranks: tuple[int, int] = (1, 1),
    replica: int = 0,
    block_size: int = BLOCK,
    **extra: Any,
) -> NixlBaseConnector:
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector=kind.__name__,
            kv_role="kv_both",
            engine_id="engine",
            kv_connector_extra_config=extra,
        )
    )
    config.cache_config.block_size = block_size
    parallel = config.parallel_config
    parallel.pipeline_parallel_size, parallel.tensor_parallel_size = ranks
    parallel.data_parallel_index = replica
    return kind(config, KVConnectorRole.SCHEDULER, _cache(groups))


@pytest.fixture
def blocks() -> BlockPool:
    return pool()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free: int = sock.getsockname()[1]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free))
    return free


@pytest.fixture
def connector(blocks: BlockPool, port: int) -> Iterator[NixlBaseConnector]:
    connector = _make()
    connector.bind_kv_cache_manager(manager(blocks))
    connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): NixlHandshakeMetadata(encode(HERE))}
    )
    yield connector
    connector.shutdown()


def _ask(port: int, what: GetIntegrity | GetHandoffs | GetFailure) -> Any:
    reply = query(("127.0.0.1", port), what, 5)
    assert isinstance(reply, Report)
    return json.loads(reply.json)


def _report(connector: NixlBaseConnector, *events: Any) -> KVConnectorOutput:
    report = RankReport(0, events, {"sender_handoffs": 0})
    output = KVConnectorOutput(kv_connector_worker_meta=NixlWorkerMetadata([report]))
    connector.update_connector_output(output)
    return output


def test_the_factory_knows_the_three_names() -> None:
    names = {
        "NixlConnector": NixlPullConnector,
        "NixlPullConnector": NixlPullConnector,
        "NixlPushConnector": NixlPushConnector,
    }
    for name, kind in names.items():
        assert KVConnectorFactory.get_connector_class_by_name(name) is kind
    assert NixlConnector.mode is Mode.PULL
    assert NixlPushConnector.mode is Mode.PUSH


def test_importing_loads_no_nixl() -> None:
    code = (
        "import sys; import vllm.distributed.kv_transfer.kv_connector.v1.nixl; "
        "print('loaded', [n for n in sys.modules if n.startswith('nixl')])"
    )
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=env)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stderr


@pytest.mark.parametrize("kind", [NixlPushConnector, NixlPullConnector])
def test_an_unknown_key_stops_the_start(kind: type[NixlBaseConnector]) -> None:
    with pytest.raises(ConfigError, match=r"\['kv_leese'\].*kv_lease_duration"):
        _make(kind, kv_leese=1)


def test_groups_of_layers_need_piecewise_graphs() -> None:
    # A captured graph would skip the call between two layers.
    grouped = {"push_layer_groups": 2}
    assert NixlPushConnector.requires_piecewise_for_cudagraph(grouped)
    assert not NixlPushConnector.requires_piecewise_for_cudagraph({})
    assert not NixlPullConnector.requires_piecewise_for_cudagraph(grouped)


def test_an_unsupported_model_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        _make(groups=2, block_size=2 * BLOCK)


def test_a_defect_in_a_hook_does_not_reach_the_engine() -> None:
    connector = _make()
    thing: Any = object()
    assert connector.on_new_request(thing) is None
    assert connector.get_num_new_matched_tokens(thing, 0) == (0, False)
    assert connector.update_state_after_alloc(thing, thing, 5) is None
    assert connector.build_connector_meta(thing) == NixlConnectorMetadata()
    assert connector.update_connector_output(thing) is None
    assert connector.request_finished(thing, []) == (False, None)


def test_a_prefill_leg_from_its_arrival_to_its_release(
    connector: NixlBaseConnector, blocks: BlockPool, port: int
) -> None:
    prompt = request("r-12345678", params=PREFILL)
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 0) == (0, False)
    held = allocate(blocks, 3)
    connector.update_state_after_alloc(prompt, held, 0)
    output = step(new=[(prompt, 0, 40)], tables={prompt.request_id: held})
    orders = connector.build_connector_meta(output)
    assert isinstance(orders, NixlConnectorMetadata)
    assert [type(command) for command in orders.commands] == [Expect]
    (offer,) = orders.offers
    prompt.status = prompt.status.FINISHED_LENGTH_CAPPED
    assert supports_hma(connector)
    delayed, params = connector.request_finished_all_groups(
        prompt, held.get_block_ids()
    )
    assert not delayed
    assert params is not None
    assert params["remote_port"] == port
    assert params["remote_engine_id"] == "engine"
    blocks.free_blocks(held.blocks[0])
    assert _ask(port, GetIntegrity())["pins"]["exposed_for_send"] == 3
    assert connector.has_pending_push_work()
    closed = SenderClosed(
        offer.transfer_id,
        offer.generation,
        CloseReason.SERVED,
        40,
        TransferSize(9, 1),
        0.1,
    )
    _report(connector, closed)
    integrity = _ask(port, GetIntegrity())
    assert integrity["free_blocks"] == integrity["total_blocks"] == BLOCKS - 1
    assert not any(integrity["tables"].values())
    assert integrity["counters"]["sender_served"] == 1
    (record,) = _ask(port, GetHandoffs())
    assert (record["transfer_id"], record["role"], record["bytes"]) == (
        "t",
        "sender",
        9,
    )
    assert _ask(port, GetFailure(TransferId("t")))["outcome"] == "served"
    assert _ask(port, GetFailure(TransferId("never"))) is None


LONG_BLOCKS = 4 * STEP_BLOCKS


def _released(blocks: BlockPool, engine: Any = None) -> NixlBaseConnector:
    """A connector that has just released the blocks of a long prompt."""
    connector = _make()
    connector.bind_kv_cache_manager(engine or manager(blocks))
    prompt = request("r-12345678", LONG_BLOCKS * BLOCK, params=PREFILL)
    connector.on_new_request(prompt)
    held = allocate(blocks, LONG_BLOCKS)
    output = step(new=[(prompt, 0, prompt.num_tokens)], tables={"r-12345678": held})
    (offer,) = _built(connector, output).offers
    prompt.status = prompt.status.FINISHED_LENGTH_CAPPED
    connector.request_finished(prompt, held.get_block_ids()[0])
    blocks.free_blocks(held.blocks[0])
    size = TransferSize(9, 1)
    _report(
        connector,
        SenderClosed(
            offer.transfer_id, offer.generation, CloseReason.SERVED, 40, size, 0.1
        ),
    )
    assert available(blocks) == blocks.num_gpu_blocks - 1 - LONG_BLOCKS
    return connector


def _built(connector: NixlBaseConnector, output: SchedulerOutput) -> Any:
    return connector.build_connector_meta(output)


@pytest.fixture
def large() -> BlockPool:
    return BlockPool(4 * LONG_BLOCKS, enable_caching=True, hash_block_size=BLOCK)


def test_the_engine_steps_on_until_all_blocks_are_given_back(large: BlockPool) -> None:
    connector = _released(large)
    steps = 0
    while connector.has_pending_push_work():
        orders = _built(connector, step())
        steps += 1
        # A step that computes nothing does not wait for news then.
        assert orders.reply == (available(large) < large.num_gpu_blocks - 1)
    assert steps == LONG_BLOCKS // STEP_BLOCKS
    assert available(large) == large.num_gpu_blocks - 1


def test_a_running_request_that_lacks_blocks_gets_those_that_are_due(
    large: BlockPool,
) -> None:
    connector = _released(large)
    assert connector.has_pending_block_frees()
    assert available(large) == large.num_gpu_blocks - 1
    assert not connector.has_pending_block_frees()


def test_a_waiting_request_gets_them_before_it_is_given_blocks(
    large: BlockPool,
) -> None:
    connector = _released(large)
    short = request("s-12345678", 40)
    connector.get_num_new_matched_tokens(short, 0)
    assert available(large) == large.num_gpu_blocks - 1 - LONG_BLOCKS
    long = request("l-12345678", (large.num_gpu_blocks - LONG_BLOCKS) * BLOCK)
    connector.get_num_new_matched_tokens(long, 0)
    assert available(large) == large.num_gpu_blocks - 1


def test_the_cache_is_reset_while_blocks_are_due(large: BlockPool) -> None:
    engine = manager(large)
    _released(large, engine)
    assert not large.reset_prefix_cache()
    assert engine.reset_prefix_cache()
    assert available(large) == large.num_gpu_blocks - 1


@pytest.mark.parametrize("window", [None, 64])
def test_only_full_attention_lends_the_blocks_of_parked_requests(
    blocks: BlockPool, window: int | None
) -> None:
    connector = _make()
    engine = manager(blocks)
    if window is not None:
        spec = SlidingWindowSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.float32,
            sliding_window=window,
        )
        engine.kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["layer"], spec)]
    connector.bind_kv_cache_manager(engine)
    parked = request("r-12345678", params=DECODE)
    connector.on_new_request(parked)
    held = allocate(blocks, 3)
    connector.update_state_after_alloc(parked, held, 40)
    references = 1 if window is None else 2
    assert {block.ref_cnt for block in held.blocks[0]} == {references}


def test_a_prefill_leg_that_names_a_decode_engines_blocks_just_computes() -> None:
    connector = _make()
    params = {**DECODE, **PREFILL, "do_remote_prefill": False}
    prompt = request("r-12345678", params={**params, "remote_block_ids": [[1, 2]]})
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 0) == (0, False)


def test_names_that_users_choose_are_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the engine appends nothing, what looks like its suffix is the user's."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    connector = _make()
    names = ["conv-deadbeef", "conv-cafebabe"]
    for name in names:
        connector.on_new_request(request(name, params={"do_remote_decode": True}))
    orders = connector.build_connector_meta(step())
    assert isinstance(orders, NixlConnectorMetadata)
    expected = [order for order in orders.commands if isinstance(order, Expect)]
    assert [order.transfer_id for order in expected] == names
    assert {alias for order in expected for alias in order.aliases} == set(names)


def test_a_decode_leg_from_its_arrival_to_its_kv(
    connector: NixlBaseConnector, blocks: BlockPool, port: int
) -> None:
    prompt = request("r-12345678", params=DECODE)
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 16) == (24, True)
    held = allocate(blocks, 3)
    connector.update_state_after_alloc(prompt, held, 24)
    orders = connector.build_connector_meta(step())
    assert isinstance(orders, NixlConnectorMetadata)
    assert [type(c) for c in orders.commands][:2] == [Watch, Receive]
    receive = orders.commands[1]
    assert isinstance(receive, Receive)
    registration_id = receive.request.registration_id
    output = _report(connector, Received(registration_id, 24, TransferSize(9, 1), 0.1))
    assert output.finished_recving == {prompt.request_id}
    finish(prompt, ABORTED)
    assert connector.request_finished(prompt, held.get_block_ids()[0]) == (False, None)
    blocks.free_blocks(held.blocks[0])
    assert available(blocks) == BLOCKS - 1
    assert not any(_ask(port, GetIntegrity())["tables"].values())


@pytest.mark.parametrize(
    ("params", "counter"),
    [
        ({**DECODE, "remote_port": "5600"}, "invalid_params"),
        ({"do_remote_decode": 7}, "invalid_params"),
    ],
)
def test_params_that_cannot_be_used_are_counted_and_served_without(
    connector: NixlBaseConnector, port: int, params: dict[str, Any], counter: str
) -> None:
    prompt = request("r-12345678", params=params)
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 0) == (0, False)
    assert _ask(port, GetIntegrity())["counters"][counter] == 1


def test_a_decode_leg_contacts_only_allowed_peers() -> None:
    connector = _make(allowed_peers=["10.0.0.0/8"])
    prompt = request("r-12345678", params=DECODE)
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 0) == (0, False)
    inside = request("s-12345678", params={**DECODE, "remote_host": "10.1.1.1"})
    connector.on_new_request(inside)
    assert connector.get_num_new_matched_tokens(inside, 0) == (40, True)


def test_reports_of_ranks_are_joined() -> None:
    one = NixlWorkerMetadata([RankReport(0, (), {})])
    other = NixlWorkerMetadata([RankReport(1, (), {})])
    assert [report.rank for report in one.aggregate(other).reports] == [0, 1]


def _step_of(rank: int, facts: NixlWorkerMetadata | None) -> ModelRunnerOutput:
    stats = NixlKVConnectorStats()
    stats.transfer(0.1, 0.1, 8, 1)
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    output.kv_connector_output = KVConnectorOutput(
        kv_connector_stats=stats if rank else None, kv_connector_worker_meta=facts
    )
    return output


@pytest.mark.parametrize("silent", [(), (0,), (3,), (1, 2)])
def test_the_executor_joins_what_the_ranks_of_a_step_say(
    port: int, silent: tuple[int, ...]
) -> None:
    connector = _make(ranks=(2, 2))
    connector.bind_kv_cache_manager(manager(pool()))
    outputs: list[ModelRunnerOutput | None] = [
        _step_of(
            rank,
            None
            if rank in silent
            else NixlWorkerMetadata([RankReport(rank, (), {"transfers": 1})]),
        )
        for rank in range(4)
    ]
    joined = KVOutputAggregator.from_connector(connector, 4).aggregate(outputs)
    assert joined is not None
    assert joined.kv_connector_output is not None
    connector.update_connector_output(joined.kv_connector_output)
    stats = joined.kv_connector_output.kv_connector_stats
    assert isinstance(stats, NixlKVConnectorStats)
    assert stats.reduce()["Num successful transfers"] == 3
    observed = connector.get_kv_connector_stats()
    assert isinstance(observed, NixlKVConnectorStats)
    assert observed.data["queued_transfers"] == [4 - len(silent)]


def test_every_worker_must_have_described_itself(port: int) -> None:
    connector = _make(ranks=(2, 2))
    described = {
        (stage, rank): NixlHandshakeMetadata(encode(HERE))
        for stage in range(2)
        for rank in range(2)
    }
    del described[1, 0]
    with pytest.raises(SideChannelFailure, match=r"workers \[\(1, 0\)\]"):
        connector.set_xfer_handshake_metadata_pp_aware(described)
    described[1, 0] = described[0, 0]
    connector.set_xfer_handshake_metadata_pp_aware(described)
    reply = query(("127.0.0.1", port), GetRanks(), 5)
    assert isinstance(reply, Ranks)
    assert len(reply.ranks) == 4
    connector.shutdown()


def test_workers_without_a_pipeline_may_be_told_by_their_rank(port: int) -> None:
    connector = _make(ranks=(1, 2))
    connector.set_xfer_handshake_metadata(
        {rank: NixlHandshakeMetadata(encode(HERE)) for rank in range(2)}
    )
    reply = query(("127.0.0.1", port), GetRanks(), 5)
    assert isinstance(reply, Ranks)
    assert len(reply.ranks) == 2
    connector.shutdown()


def test_each_data_parallel_rank_has_a_port_of_its_own(
    port: int, blocks: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port - 3))
    connector = _make(replica=3)
    connector.bind_kv_cache_manager(manager(blocks))
    connector.set_xfer_handshake_metadata({0: NixlHandshakeMetadata(encode(HERE))})
    reply = query(("127.0.0.1", port), GetRanks(), 5)
    assert isinstance(reply, Ranks)
    held = allocate(blocks, 3)
    prompt = request("r-12345678", params=PREFILL)
    connector.on_new_request(prompt)
    _built(connector, step(new=[(prompt, 0, 40)], tables={"r-12345678": held}))
    prompt.status = prompt.status.FINISHED_LENGTH_CAPPED
    _, told = connector.request_finished(prompt, held.get_block_ids()[0])
    assert told is not None
    assert told["remote_port"] == port
    connector.shutdown()


def test_an_engine_with_a_pipeline_computes_decode_legs_itself() -> None:
    connector = _make(ranks=(2, 1))
    connector.bind_kv_cache_manager(manager(pool()))
    prompt = request("r-12345678", params=DECODE)
    connector.on_new_request(prompt)
    assert connector.get_num_new_matched_tokens(prompt, 0) == (0, False)
    metadata = connector.build_connector_meta(step())
    assert isinstance(metadata, NixlConnectorMetadata)
    address = ("127.0.0.1", 5600)
    assert metadata.commands[-1] == TellNotNeeded(TransferId("u"), address, 1)
    connector.request_finished(finish(prompt, ABORTED), [])
    assert connector.build_connector_meta(step()) == NixlConnectorMetadata(
        computes=False
    )


def test_stats_are_rebuilt_from_their_data() -> None:
    stats = NixlKVConnectorStats()
    stats.transfer(0.1, 0.1, 8, 1)
    rebuilt = NixlPushConnector.build_kv_connector_stats(stats.data)
    assert isinstance(rebuilt, NixlKVConnectorStats)
    assert rebuilt.reduce() == stats.reduce()
    connector = _make()
    connector.bind_kv_cache_manager(manager(pool()))
    assert connector.get_kv_connector_stats() is None


def test_every_transferred_group_is_loaded() -> None:
    assert _make().get_loaded_kv_cache_group_ids(request("r")) == (0,)


def test_two_shutdowns_are_one(connector: NixlBaseConnector) -> None:
    connector.shutdown()
    connector.shutdown()
