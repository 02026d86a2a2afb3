# SPDX-License-Identifier: Apache-2.0
"""Known peers: who they are, and whether they still are."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from v1.kv_connector.unit.nixl.arena import Memory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import AgentError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peers import (
    SETTLE_SECONDS,
    PeerDirectory,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    ProcessInfo,
    RankInfo,
)

pytestmark = pytest.mark.timeout(30)

HERE, THERE = ("10.0.0.1", 5600), ("10.0.0.2", 5600)


class Known:
    """A directory that has admitted one peer."""

    def __init__(self) -> None:
        self.mine, self.theirs = Memory("mine", Mode.PUSH), Memory("other", Mode.PUSH)
        self.peers = PeerDirectory(self.mine.agent, self.mine.info, enforce=True)
        self.peer = self.peers.admit(self.theirs.info, 1.0)
        self.name = self.theirs.name

    def successor(self, **changes: Any) -> RankInfo:
        """Another incarnation, as it would describe itself."""
        changes = {"agent_name": "successor", **changes}
        return msgspec.structs.replace(self.theirs.info, **changes)

    def close(self) -> None:
        self.theirs.agent.close()
        self.mine.agent.close()


@pytest.fixture
def known() -> Iterator[Known]:
    known = Known()
    yield known
    known.close()


def _ended(info: RankInfo) -> ProcessInfo:
    """That the process has given its number to a later one."""
    ticks = info.process.start_ticks - 1
    return msgspec.structs.replace(info.process, start_ticks=ticks)


def test_a_peer_is_admitted_once(known: Known) -> None:
    assert known.peer.refusal is None
    assert known.peers.admit(known.theirs.info, 5.0) is known.peer
    assert known.peer.used_at == 5.0
    assert len(known.peers) == 1
    assert known.peers.get(known.name) is known.peer


def test_a_broken_peer_is_connected_anew(known: Known) -> None:
    first = known.peers.prepared(known.name, gives=True)
    known.peer.broken = True
    again = known.peers.admit(known.theirs.info, 2.0)
    assert again is not known.peer
    assert not again.broken
    assert known.peers.prepared(known.name, gives=True) is not first


def test_metadata_must_belong_to_its_name(known: Known) -> None:
    with pytest.raises(AgentError, match="successor"):
        known.peers.admit(known.successor(), 2.0)
    assert len(known.peers) == 1


def test_a_rank_is_no_peer_of_itself(known: Known) -> None:
    with pytest.raises(AgentError, match="remote_host and remote_port must be"):
        known.peers.admit(known.mine.info, 1.0)


def test_metadata_that_is_none_is_refused(known: Known) -> None:
    with pytest.raises(AgentError):
        known.peers.admit(known.successor(agent_metadata=b"rubbish"), 2.0)


def test_a_peer_is_forgotten_with_all_that_was_made_for_it(known: Known) -> None:
    known.peers.prepared(known.name, gives=True)
    known.peers.remove(known.name)
    known.peers.remove(known.name)
    assert known.peers.get(known.name) is None
    with pytest.raises(AgentError):
        known.mine.agent.notify(known.name, b"x")


def test_idle_peers_are_found(known: Known) -> None:
    assert known.peers.idle_since(1.0) == []
    assert known.peers.idle_since(1.1) == [known.name]


def test_the_ranks_that_serve_this_one(known: Known) -> None:
    info = known.theirs.info
    assert known.peers.sources((info,)) == (known.name,)
    with pytest.raises(AgentError, match="did not describe"):
        known.peers.sources((msgspec.structs.replace(info, tp_rank=1),))
    assert known.peers.readers(known.name) == 1
    assert known.peers.idle((info,)) == ()


def test_a_successor_at_the_same_address_of_the_same_host_is_proof(
    known: Known,
) -> None:
    known.peer.addresses = {HERE}
    other = ProcessInfo("another boot", 1, 1)
    assert known.peers.superseded_by(known.theirs.info, HERE) == []
    assert known.peers.superseded_by(known.successor(engine_id="new"), THERE) == []
    assert known.peers.superseded_by(known.successor(engine_id="new"), None) == []
    assert known.peers.superseded_by(known.successor(process=other), HERE) == []
    found = known.peers.superseded_by(known.successor(engine_id="new"), HERE)
    assert found == [known.name]


def test_the_first_rank_of_a_smaller_successor_is_proof_for_all(known: Known) -> None:
    known.peer.addresses = {HERE}
    known.peer.info = msgspec.structs.replace(
        known.theirs.info, tp_rank=1, tp_size=2, pp_size=2
    )
    for place in ({}, {"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}):
        found = known.peers.superseded_by(known.successor(**place), HERE)
        assert found == ([] if place.get("tp_rank") == 0 else [known.name])
    second = known.successor(tp_rank=0, tp_size=1, pp_rank=1, pp_size=2)
    assert known.peers.superseded_by(second, HERE) == []


def test_an_agent_told_of_at_several_addresses_has_no_successor_there(
    known: Known,
) -> None:
    known.peer.addresses = {HERE, THERE}
    successor = known.successor(engine_id="new")
    assert known.peers.superseded_by(successor, HERE) == []
    assert known.peers.superseded_by(successor, THERE) == []


def test_a_successor_of_a_process_that_has_ended_is_proof(known: Known) -> None:
    assert known.peers.superseded_by(known.successor(), None) == []
    known.peer.info = msgspec.structs.replace(
        known.theirs.info, process=_ended(known.theirs.info)
    )
    assert known.peers.superseded_by(known.successor(), None) == [known.name]
    assert known.peers.superseded_by(known.successor(tp_rank=1), None) == []
    assert known.peers.superseded_by(known.successor(engine_id="new"), None) == []


def test_a_peer_is_gone_a_while_after_its_process(known: Known) -> None:
    known.peer.info = msgspec.structs.replace(
        known.theirs.info, process=_ended(known.theirs.info)
    )
    assert known.peers.provably_gone(10.0) == []
    known.peer.lost = True
    assert known.peers.provably_gone(10.0) == []
    assert known.peers.provably_gone(10.0 + SETTLE_SECONDS / 2) == []
    assert known.peers.provably_gone(10.1 + SETTLE_SECONDS) == [known.name]


def test_a_lost_peer_that_lives_is_not_gone(known: Known) -> None:
    known.peer.lost, known.peer.addresses = True, {HERE}
    known.peers.provably_gone(1.0)
    assert known.peers.provably_gone(1000.0) == []
    assert known.peers.lost_at() == {HERE}
