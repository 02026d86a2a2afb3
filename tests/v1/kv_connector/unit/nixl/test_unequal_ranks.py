# SPDX-License-Identifier: Apache-2.0
"""Unequal ranks over real NIXL: the lists and indices that simulated memory is moved by
mean to it what they mean there."""

import time
from collections.abc import Iterator

import msgspec
import pytest

from v1.kv_connector.unit.nixl.simulated_memory import (
    Case,
    Layer,
    Side,
    SimulatedRank,
    Simulation,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    Agent,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pairing import PairingError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peers import PeerDirectory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import plan

pytestmark = pytest.mark.timeout(90)

HEADS = tuple(Layer(f"l{i}", 4, 8) for i in range(2))
WINDOWS = tuple(Layer(f"l{i}", 2, 8, i % 2, 9 * (i % 2)) for i in range(4))
LATENTS = (Layer("attn", 1, 12), Layer("indexer", 1, 4))
PATIENCE_S = 20.0


class OverNixl(Simulation):
    """Each rank has an agent, and knows its peers as a transfer loop would."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._agents: dict[AgentName, Agent] = {}
        self._peers: dict[AgentName, PeerDirectory] = {}
        for rank in (*self.givers, *self.takers):
            name = rank.info.agent_name
            agent = Agent(name, ["UCX"], 0, False)
            agent.register(rank.layout.ranges, "DRAM")
            rank.info = msgspec.structs.replace(
                rank.info, agent_metadata=agent.metadata()
            )
            self._agents[name] = agent
            self._peers[name] = PeerDirectory(agent, rank.info, enforce=True)

    def close(self) -> None:
        for agent in self._agents.values():
            agent.close()

    def _move(self, giver: SimulatedRank, taker: SimulatedRank) -> None:
        writes = self.case.writes
        local, remote = (giver, taker) if writes else (taker, giver)
        name = local.info.agent_name
        agent, peers = self._agents[name], self._peers[name]
        peer = peers.admit(remote.info, 0.0)
        assert peer.refusal is None
        prepared = peers.prepared(remote.info.agent_name, writes)
        tables = self.tables if writes else self.tables[::-1]
        mine, theirs = (
            [table[_blocks(self.case, side.side.block)] for table in group]
            for side, group in zip((local, remote), tables, strict=True)
        )
        (part,) = prepared.lists.parts
        for piece in plan(part, self.case.want, mine, theirs, self.case.max_bytes):
            handle, state = agent.post(
                "WRITE" if writes else "READ",
                prepared.local,
                piece.local,
                prepared.remote,
                piece.remote,
                b"",
            )
            deadline = time.monotonic() + PATIENCE_S
            while state is TransferState.RUNNING:
                assert time.monotonic() < deadline
                self._agents[remote.info.agent_name].notifications()
                state = agent.check(handle)
            agent.release(handle)
            assert state is TransferState.DONE


def _blocks(case: Case, size: int) -> slice:
    found = case.want.block_range(size)
    return slice(found.start, found.stop)


CASES = [
    Case(Side(tp=1), Side(tp=2), HEADS, 29, 0, 29),
    Case(Side(tp=4), Side(tp=1), HEADS, 29, 8, 21, writes=False),
    Case(Side(block=8), Side(block=2, layout="BLHNC"), LATENTS, 29, 0, 29),
    Case(Side(block=2, tp=2), Side(block=8), LATENTS, 29, 8, 13, writes=False),
    Case(Side(block=8, layout="CPU"), Side(block=4, layout="CPU"), HEADS, 29, 4, 25),
    Case(Side(block=4, pp=2), Side(block=8, tp=2), WINDOWS, 29, 0, 29, max_bytes=200),
    Case(Side(layout="BLHNC"), Side(layout="BLHNC"), HEADS, 29, 0, 29),
]


@pytest.fixture(params=CASES)
def simulation(request: pytest.FixtureRequest) -> Iterator[OverNixl]:
    made = OverNixl(request.param)
    yield made
    made.close()


def test_nixl_moves_what_the_lists_name(simulation: OverNixl) -> None:
    simulation.run()
    simulation.check()


def test_peers_of_the_same_shape_have_a_local_list_in_common() -> None:
    """It is given back with the last of them."""
    made = OverNixl(Case(Side(), Side(tp=2), LATENTS, 8, 0, 8))
    (giver,) = made.givers
    peers = made._peers[giver.info.agent_name]
    names = [rank.info.agent_name for rank in made.takers]
    for rank in made.takers:
        peers.admit(rank.info, 0.0)
    first, second = (peers.prepared(name, gives=True) for name in names)
    assert first.local is second.local
    assert first.remote is not second.remote
    assert peers.prepared(names[0], gives=True) is first
    # The other way there is nothing to move: the other copy is as good.
    assert peers.prepared(names[0], gives=False).local is first.local
    with pytest.raises(PairingError, match="has nothing for this rank"):
        peers.prepared(names[1], gives=False)
    peers.remove(names[0])
    assert peers.prepared(names[1], gives=True) is second
    peers.remove(names[1])
    assert not peers._lists
    made.close()
