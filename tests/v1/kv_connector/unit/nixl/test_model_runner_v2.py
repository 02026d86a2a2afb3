# SPDX-License-Identifier: Apache-2.0
"""The worker's hooks in the order of the base's second model runner.

That runner itself needs an accelerator; its part that calls the connector does not.
"""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Expect,
    NixlConnectorMetadata,
    NixlWorkerMetadata,
    Receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    Offer,
    Received,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode, TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import role
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.worker.gpu import kv_connector as v2

pytestmark = pytest.mark.timeout(90)

PATIENCE_S = 20.0
T = TransferId("t")
HERE, THERE = np.array([9, 8, 3], np.int32), np.array([20, 21, 7], np.int32)
KINDS = {Mode.PUSH: NixlPushConnector, Mode.PULL: NixlPullConnector}


class Runner:
    """A worker as that runner drives it, with a forward pass that fills the cache."""

    def __init__(self, name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [f"layer{index}" for index in range(LAYERS)]
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        kind = KINDS[mode]
        config = VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector=kind.__name__,
                kv_role="kv_both",
                engine_id=name,
                kv_connector_extra_config={"num_threads": 0},
            )
        )
        config.cache_config.block_size = BLOCK_TOKENS
        cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(layers, spec)])
        self.caches = {
            layer: torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8)
            for layer in layers
        }
        self.connector = kind(config, KVConnectorRole.WORKER, cache)
        monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: self.connector)
        self._hooks = v2.ActiveKVConnector(config, self.caches)
        described: Any = self.connector.get_handshake_metadata()
        self.address = free_address()
        ranks = [described.rank_info]
        self._server = SideChannelServer(self.address, ranks, NoReports())
        self.events: list[Event] = []

    def step(
        self, *commands: Command, offers: tuple[Offer, ...] = (), computes: int = 0
    ) -> None:
        """A step whose forward pass writes ``computes`` everywhere; 0 for none."""
        scheduled = SimpleNamespace(
            kv_connector_metadata=NixlConnectorMetadata(commands, offers),
            has_sync_kv_loads=False,
            finished_req_ids=set(),
        )
        if computes:
            self._hooks.pre_forward(scheduled)
            for cache in self.caches.values():
                cache.fill_(computes)
            self._hooks.finish_forward()
            told = self._hooks.post_forward(scheduled.finished_req_ids)
        else:
            told = self._hooks.no_forward(scheduled).kv_connector_output
        metadata = None if told is None else told.kv_connector_worker_meta
        if isinstance(metadata, NixlWorkerMetadata):
            for report in metadata.reports:
                self.events += report.events

    def has(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def close(self) -> None:
        self._server.close()
        self.connector.shutdown()


@pytest.fixture(params=Mode)
def mode(request: pytest.FixtureRequest) -> Mode:
    made: Mode = request.param
    return made


@pytest.fixture
def pair(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Runner, Runner]]:
    monkeypatch.setattr(role, "get_tensor_model_parallel_rank", lambda: 0)
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(role, "get_pp_group", lambda: group)
    for facts in ("compat_facts", "layout_facts"):
        monkeypatch.setattr(role, facts, lambda *_: {})
    made = [Runner(name, mode, monkeypatch) for name in ("prefill", "decode")]
    yield made[0], made[1]
    for runner in made:
        runner.close()


def test_a_hand_off(mode: Mode, pair: tuple[Runner, Runner]) -> None:
    prefill, decode = pair
    decode.step(Receive(request(T, THERE, mode), prefill.address))
    prefill.step(Expect(T, 1, ()), offers=(offer(T, HERE).offer,), computes=42)
    deadline = time.monotonic() + PATIENCE_S
    while not (decode.has(Received) and prefill.has(SenderClosed)):
        assert time.monotonic() < deadline, (prefill.events, decode.events)
        decode.step()
        prefill.step()
        time.sleep(0.002)
    index = torch.from_numpy(THERE).long()
    assert all(bool((c[index] == 42).all()) for c in decode.caches.values())
    others = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    others[index] = False
    assert not any(bool(c[others].any()) for c in decode.caches.values())
