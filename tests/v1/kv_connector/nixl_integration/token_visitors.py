# SPDX-License-Identifier: Apache-2.0
"""Agents that visit an engine as a decode engine would, with its token or without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from handoff_engines import BLOCK_SIZE
from pd_launcher import Engine
from v1.kv_connector.unit.nixl.arena import Stranger
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
    new_registration_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import MemoryRange
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Cancel,
    Hello,
    Message,
    NotNeeded,
    Register,
    Renew,
    Want,
    decode_packet,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RankInfo

HEARING_S = 10.0
POLL_S = 0.01
CACHE_BLOCKS = 32

Heard = list[Message]


class Visitor(Stranger):
    """An agent with a cache that is laid out as its host's; for one thread."""

    def __init__(self, engine_id: str, host: RankInfo) -> None:
        super().__init__(engine_id, Mode.PUSH, host)
        self.host = host
        self.heard: Heard = []
        (page_bytes,) = {region.page_bytes for region in host.regions}
        shape = (len(host.regions), CACHE_BLOCKS, page_bytes)
        self.cache: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        extent = MemoryRange(self.cache.ctypes.data, self.cache.nbytes, 0)
        self.agent.register([extent], host.mem_type)
        self.info = msgspec.structs.replace(
            host,
            engine_id=self.info.engine_id,
            agent_name=self.name,
            agent_metadata=self.agent.metadata(),
            process=self.info.process,
            regions=tuple(
                msgspec.structs.replace(
                    region,
                    address=pages.ctypes.data,
                    stride=page_bytes,
                    num_blocks=CACHE_BLOCKS,
                )
                for region, pages in zip(host.regions, self.cache, strict=True)
            ),
        )

    def introduction(self, token: Token) -> Hello:
        """What an agent that holds ``token`` says of itself."""
        return self.hello(token.introduction(self.name, self.host.agent_name))

    def listen(self) -> Heard:
        """All that the host has said so far; lets the transport make progress."""
        self.heard += [decode_packet(data).body for data in self.hear()]
        return self.heard

    async def until(self, heard: Callable[[Heard], bool]) -> None:
        """Listen until it has been said.

        Raises:
            AssertionError: it is not said in time.
        """
        deadline = time.monotonic() + HEARING_S
        while not heard(self.listen()):
            assert time.monotonic() < deadline, f"heard only {self.heard}"
            await asyncio.sleep(POLL_S)

    def written(self, tokens: int) -> bool:
        """Whether there is something in each page that a prompt takes."""
        return bool(self.cache[:, : _blocks(tokens)].any(axis=2).all())

    def close(self) -> None:
        self.listen()
        super().close()


@contextmanager
def visitor(engine_id: str, host: RankInfo) -> Iterator[Visitor]:
    made = Visitor(engine_id, host)
    try:
        yield made
    finally:
        made.close()


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def register(transfer_id: str, tokens: int) -> Register:
    """Write the KV of a whole prompt into my first blocks."""
    return Register(
        TransferId(transfer_id),
        new_registration_id(),
        # Without a digest of the prompt, which a thief of KV does not know.
        Want(tokens, 0, tokens, b""),
        (pack_blocks(np.arange(_blocks(tokens))),),
    )


def demands(
    transfer_id: str, tokens: int, registration_id: RegistrationId
) -> list[Message]:
    """Whatever might take a hand-off, or end it for those that take part in it."""
    name = TransferId(transfer_id)
    return [
        register(transfer_id, tokens),
        Cancel(registration_id, name),
        Cancel(new_registration_id(), name),
        NotNeeded(name, 0),
        Renew((name,)),
    ]


def false_introductions(
    who: Visitor, token: Token, other: Token, guest: Hello, guest_name: AgentName
) -> list[tuple[Hello | None, str]]:
    """How one without ``token`` may try to get in, and why it is turned away.

    ``guest`` is the introduction of an agent that was let in, as overheard.
    """
    host = who.host.agent_name
    unproven = "it does not hold the side_channel_token_file"
    return [
        (None, "the agent has not introduced itself"),
        (who.hello(), unproven),
        (who.introduction(other), unproven),
        (who.hello(guest.proof), unproven),
        (who.hello(token.introduction(host, who.name)), unproven),
        (guest, f"it introduces itself as {guest_name!r}"),
    ]


async def turned_away(
    who: Visitor,
    engine: Engine,
    said: Sequence[Message],
    introductions: Sequence[tuple[Hello | None, str]],
) -> None:
    """Say everything with each introduction; returns once all of it was refused.

    Raises:
        AssertionError: the engine's log does not name each refusal in time.
    """
    expected: dict[str, int] = {}
    for hello, reason in introductions:
        expected[reason] = expected.get(reason, 0) + len(said)
        for message in said:
            who.send(message, hello)
    deadline = time.monotonic() + HEARING_S
    while (found := _refusals(engine, who.name, expected)) != expected:
        assert time.monotonic() < deadline, f"refused {found} of {expected}"
        who.listen()
        await asyncio.sleep(POLL_S * 10)
    assert who.listen() == []
    assert not who.cache.any()


def _refusals(
    engine: Engine, name: AgentName, reasons: dict[str, int]
) -> dict[str, int]:
    log = engine.log_path.read_text()
    start = f"A notification of agent {name} is ignored: "
    return {reason: log.count(start + reason) for reason in reasons}
