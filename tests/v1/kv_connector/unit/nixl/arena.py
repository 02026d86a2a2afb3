# SPDX-License-Identifier: Apache-2.0
"""Real transfer loops on real NIXL agents in one process, and a peer that is none."""

import socket
import time
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Agent
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Command,
    Expect,
    Keep,
    Receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    Offer,
    Received,
    ReceiveFailed,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    EngineId,
    Mode,
    TransferId,
    new_agent_name,
    new_registration_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import MemoryRange
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.orders import Facts, PendingOffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.process import this_process
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Address,
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfer_loop import TransferLoop
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Hello,
    Message,
    Packet,
    Want,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import Kept
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    RegionInfo,
)

BLOCK_TOKENS = 16
PAGE_BYTES = 256
NUM_BLOCKS = 32
LAYERS = 2
PATIENCE_S = 20.0

CONFIG = ConnectorConfig(
    num_threads=0, kv_lease_duration=2.0, peer_timeout=4.0, handshake_timeout=3.0
)


def free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


class NoReports:
    """A side channel for handshakes only."""

    def integrity(self) -> object:
        return {}

    def handoffs(self) -> object:
        return []

    def failure(self, transfer_id: TransferId) -> object:
        return None

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        return ()

    def release(self, transfer_id: TransferId) -> object:
        return None


class CountingAgent(Agent):
    """Knows how many notifications it has taken."""

    taken = 0

    def notifications(self) -> list[tuple[AgentName, bytes]]:
        got = super().notifications()
        self.taken += len(got)
        return got


class Memory:
    """A NIXL agent with a cache, and the description of both."""

    def __init__(self, engine_id: str, mode: Mode) -> None:
        self.name = new_agent_name(EngineId(engine_id), 0)
        self.agent = CountingAgent(self.name, ["UCX"], 0, False)
        self.pages: npt.NDArray[np.uint8] = np.zeros(
            (LAYERS, NUM_BLOCKS, PAGE_BYTES), dtype=np.uint8
        )
        start = self.pages.ctypes.data
        self.agent.register([MemoryRange(start, self.pages.nbytes, 0)], "DRAM")
        size = NUM_BLOCKS * PAGE_BYTES
        self.info = RankInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=EngineId(engine_id),
            agent_name=self.name,
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            block_size=BLOCK_TOKENS,
            mem_type="DRAM",
            agent_metadata=self.agent.metadata(),
            regions=tuple(
                RegionInfo(
                    f"layer{index}",
                    0,
                    start + index * size,
                    PAGE_BYTES,
                    PAGE_BYTES,
                    NUM_BLOCKS,
                    0,
                )
                for index in range(LAYERS)
            ),
            compat={"model": "tiny"},
            layout={"connector_mode": mode.value},
            process=this_process(),
        )


class Rank(Memory):
    """One worker rank of an engine, with the engine's side channel."""

    def __init__(self, engine_id: str, mode: Mode, token: Token | None = None) -> None:
        super().__init__(engine_id, mode)
        self.mode = mode
        self.events: list[Event] = []
        self.tables: dict[str, int] = {}
        self.loop = self._make_loop(token)
        self.address = free_address()
        self._server = SideChannelServer(
            self.address, [encode(self.info)], NoReports(), token
        )

    def step(self, *commands: Command | PendingOffer) -> None:
        self.loop.step(commands)

    def close(self) -> None:
        self._server.close()
        self.loop.close()

    def _make_loop(self, token: Token | None) -> TransferLoop:
        return TransferLoop(
            CONFIG, self.agent, self.info, self.mode, token, self._take, time.monotonic
        )

    def _take(self, facts: Facts) -> None:
        self.events += facts.events
        self.tables = facts.tables


class Stranger(Memory):
    """An agent that says what a test makes it say."""

    def __init__(self, engine_id: str, mode: Mode, victim: RankInfo) -> None:
        super().__init__(engine_id, mode)
        self._victim = victim.agent_name
        self.agent.add_peer(victim.agent_metadata)

    def say(self, data: bytes) -> None:
        self.agent.notify(self._victim, data)

    def send(self, message: Message, hello: Hello | None = None) -> None:
        self.say(encode(Packet(PROTOCOL_VERSION, hello, message)))

    def hello(self, proof: bytes = b"", **changes: object) -> Hello:
        return Hello(encode(msgspec.structs.replace(self.info, **changes)), proof)

    def hear(self) -> list[bytes]:
        """What the victim has said; lets the transport make progress too."""
        return [data for _, data in self.agent.notifications()]

    def close(self) -> None:
        self.agent.close()


def run(
    ranks: Iterable[Rank],
    until: Callable[[], bool],
    others: Iterable[Stranger] = (),
    seconds: float = PATIENCE_S,
) -> None:
    """Take steps in turn until it is so.

    Raises:
        AssertionError: it does not become so within the time.
    """
    ranks, others = tuple(ranks), tuple(others)
    deadline = time.monotonic() + seconds
    while not until():
        tables = [rank.tables for rank in ranks]
        assert time.monotonic() < deadline, f"not so within {seconds} s: {tables}"
        for rank in ranks:
            rank.step()
        for other in others:
            other.hear()
        time.sleep(0.0002)


def request(
    transfer_id: TransferId,
    blocks: npt.NDArray[np.int32],
    mode: Mode,
    timeout: float = PATIENCE_S,
) -> ReceiveRequest:
    """An attempt to obtain a whole prompt into ``blocks``."""
    tokens = len(blocks) * BLOCK_TOKENS
    return ReceiveRequest(
        new_registration_id(),
        transfer_id,
        Want(tokens, 0, tokens, b"digest"),
        (blocks,),
        timeout,
        mode,
    )


def offer(transfer_id: TransferId, blocks: npt.NDArray[np.int32]) -> PendingOffer:
    """The computed KV of a prompt that fills ``blocks``."""
    tokens = len(blocks) * BLOCK_TOKENS
    return PendingOffer(
        Offer(transfer_id, 1, tokens, b"digest", (blocks,)), lambda: True
    )


def keep(name: TransferId, blocks: npt.NDArray[np.int32]) -> Keep:
    """KV of as many tokens as fill ``blocks``, for later turns."""
    return Keep(Offer(name, 1, len(blocks) * BLOCK_TOKENS, b"", (blocks,)))


def hand_off(
    source: Rank, sink: Rank, name: str, others: Iterable[Stranger] = ()
) -> None:
    """Move a prompt's KV and check that it arrives and that both let go of it."""
    transfer_id = TransferId(name)
    rng = np.random.default_rng(len(name))
    here, there = (rng.permutation(NUM_BLOCKS)[:6].astype(np.int32) for _ in range(2))
    source.pages[:, here] = rng.integers(0, 256, (LAYERS, 6, PAGE_BYTES))
    wanted = request(transfer_id, there, sink.mode)
    source.step(Expect(transfer_id, 1, ()), offer(transfer_id, here))
    sink.step(Receive(wanted, source.address))

    def over() -> bool:
        ends = [
            event
            for event in sink.events
            if isinstance(event, Received | ReceiveFailed)
            and event.registration_id == wanted.registration_id
        ]
        assert not any(isinstance(event, ReceiveFailed) for event in ends), ends
        closed = any(
            isinstance(event, SenderClosed) and event.transfer_id == transfer_id
            for event in source.events
        )
        return bool(ends) and closed

    run([source, sink], over, others)
    assert np.array_equal(source.pages[:, here], sink.pages[:, there])
