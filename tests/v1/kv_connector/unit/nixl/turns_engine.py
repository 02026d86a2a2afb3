# SPDX-License-Identifier: Apache-2.0
"""An engine's connector, cache manager and side channel, for conversations."""

import json
import time
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.arena import free_address
from v1.kv_connector.unit.nixl.conversation import Cache, cache_config, prompt
from v1.kv_connector.unit.nixl.engine_side import (
    BLOCK,
    BLOCKS,
    STOPPED,
    finish,
    step,
)
from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
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
    Received,
    SenderClosed,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import query
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    GetIntegrity,
    Kept,
    Lookup,
    Release,
    Report,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

PROMPT = list(range(1000, 1000 + 3 * BLOCK))
ANSWER = list(range(500, 521))
HELD = -(-(len(PROMPT) + len(ANSWER) - 1) // BLOCK)
EXTRA = {
    "bidirectional_kv_xfer": True,
    "retention_watermark": 0.0,
    "retention_lookup_timeout": 20.0,
}


def decode_leg(name: str, **more: Any) -> dict[str, Any]:
    """The params of a decode leg."""
    return {
        "do_remote_prefill": True,
        "transfer_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        **more,
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
                self.report(closed_by_rank(order.name))

    def turn(
        self,
        name: str = "t1",
        tokens: list[int] | None = None,
        status: Any = STOPPED,
        answer: list[int] | None = None,
        **params: Any,
    ) -> dict[str, Any] | None:
        """A decode leg from its arrival to its end."""
        request = self.arrive(f"d-{name}", tokens or PROMPT, decode_leg(name, **params))
        assert self.admit(request)
        for order in self.orders():
            if isinstance(order, Receive):
                size = TransferSize(1, 1)
                wanted = order.complete()
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


def closed_by_rank(name: TransferId) -> SenderClosed:
    return SenderClosed(name, 1, CloseReason.RELEASED, 0, TransferSize(), 1.0)
