# SPDX-License-Identifier: Apache-2.0
"""Decode engines with real side channels that keep turns, behind a router."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pd_router.config import Address, ConversationSettings, Role
from pd_router.workers import Worker
from router_backends import (
    DONE,
    Cluster,
    Got,
    Script,
    Seen,
    answers,
    completion,
    free_port,
    prefill_answer,
    streams,
    token,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)

PREFILL = answers(prefill_answer())
WHOLE = answers(completion("hi", usage=(40, 7)))
STREAM = streams(token("a"), token("b", finish="stop"), DONE)


class Keeper:
    """What a decode engine's side channel is told; it knows of nothing else."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def integrity(self) -> object:
        return {}

    def handoffs(self) -> object:
        return []

    def failure(self, transfer_id: TransferId) -> object:
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Any, ...]:
        return ()

    def release(self, transfer_id: TransferId) -> object:
        self.released.append(transfer_id)
        return None


class Talk:
    """A router that continues conversations, its engines, and their keepers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.keepers: list[Keeper] = []
        self.addresses: list[Address] = []
        self._servers: list[SideChannelServer] = []

    async def start(
        self,
        mode: str,
        prefill: Script | Sequence[Script | None] = PREFILL,
        decode: Script | Sequence[Script | None] = WHOLE,
        **settings: Any,
    ) -> None:
        """Start everything; settings of conversations may be among the others."""
        names = ConversationSettings.__dataclass_fields__
        own = {name: settings.pop(name) for name in names if name in settings}
        await self.cluster.start(
            mode,
            prefill,
            decode,
            conversations=ConversationSettings(**own),
            **settings,
        )
        for worker in self.decode_workers:
            address = Address("127.0.0.1", free_port())
            keeper = Keeper()
            self._servers.append(
                SideChannelServer((address.host, address.port), [], keeper)
            )
            self.keepers.append(keeper)
            self.addresses.append(address)
            worker.spec = replace(worker.spec, report_address=address)

    def close(self) -> None:
        """Close the side channels."""
        for server in self._servers:
            server.close()

    @property
    def decode_workers(self) -> list[Worker]:
        """The router's view of the decode engines, in their order."""
        return [w for w in self.cluster.router.workers if w.role is Role.DECODE]

    async def turn(
        self,
        conversation_id: object = "talk",
        *,
        stream: bool = False,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Got:
        """One turn, and its whole answer; no id where that is ``None``."""
        if conversation_id is not None:
            body["conversation_id"] = conversation_id
        if stream:
            body["stream"] = True
        return await self.cluster.post({"prompt": "p", **body}, headers=headers)

    async def delete(
        self, conversation_id: str, headers: dict[str, str] | None = None
    ) -> Got:
        """End a conversation."""
        async with self.cluster.client.delete(
            f"/conversations/{conversation_id}", headers=headers
        ) as response:
            return Got(response.status, response.headers, await response.read())

    def prefill_leg(self, index: int, engine: int = 0) -> Seen:
        """A prefill leg, by its number at its engine."""
        return self.cluster.prefill[engine].seen[index]

    def decode_leg(self, index: int, engine: int = 0) -> Seen:
        """A decode leg, by its number at its engine."""
        return self.cluster.decode[engine].seen[index]

    def continues(self, index: int, engine: int = 0) -> str | None:
        """The transfer id that a prefill engine was told to go on from."""
        told = self.prefill_leg(index, engine).params.get("retained_transfer_id")
        assert told is None or isinstance(told, str)
        return told

    async def released(self, keeper: int, *expected: str) -> None:
        """Wait until these and no others have been released at a side channel."""
        await self.cluster.quiet()
        await until(lambda: len(self.keepers[keeper].released) >= len(expected))
        await self.settled()
        assert sorted(self.keepers[keeper].released) == sorted(expected)

    async def settled(self) -> None:
        """Wait until no release is under way."""
        multiturn = self.cluster.router.multiturn
        assert multiturn is not None
        await self.cluster.quiet()
        await until(lambda: not multiturn._releasing)


def transfer_of(seen: Seen) -> str:
    """The name of the hand-off that a leg belongs to."""
    transfer_id = seen.params["transfer_id"]
    assert isinstance(transfer_id, str)
    return transfer_id


def gated(script: Script, gate: asyncio.Event) -> Script:
    """The script, once the gate is open."""

    async def wait(seen: Seen) -> Any:
        await gate.wait()
        return await script(seen)

    return wait


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for a condition; fails after a while."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
