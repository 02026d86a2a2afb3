# SPDX-License-Identifier: Apache-2.0
"""WRITEs and READs between real NIXL agents."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from v1.kv_connector.unit.nixl.arena import LAYERS, NUM_BLOCKS, PAGE_BYTES, Memory
from v1.kv_connector.unit.nixl.planning import UNTOLD, same_pages, whole_pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    Agent,
    AgentError,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peers import SETTLE_SECONDS
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import Piece, plan
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transfers import (
    TransferEnded,
    TransferPool,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

pytestmark = pytest.mark.timeout(60)

R = RegistrationId("r")


class Ends:
    """An agent that transfers, and one that is only there."""

    def __init__(self) -> None:
        self.mine = Memory("mine", Mode.PUSH)
        self.theirs = Memory("theirs", Mode.PUSH)
        for memory, value in ((self.mine, 100), (self.theirs, 0)):
            memory.pages[:] = value + np.arange(NUM_BLOCKS)[None, :, None]
        self.peer = self.mine.agent.add_peer(self.theirs.agent.metadata())
        self.pool = TransferPool(self.mine.agent)
        regions = self.theirs.info.regions
        self.local = self.mine.agent.prepare(
            whole_pages(self.mine.info.regions), "DRAM", None
        )
        self.remote = self.mine.agent.prepare(whole_pages(regions), "DRAM", self.peer)
        self.heard: list[bytes] = []

    def start(self, operation: str, pieces: list[Piece], name: str = "r") -> None:
        self.pool.start(
            operation,
            self.peer,
            RegistrationId(name),
            0,
            self.local,
            self.remote,
            pieces,
            lambda seq, total, piece: f"{seq}/{total}/{piece.bytes}".encode(),
        )

    def finish(self, count: int = 1) -> list[TransferEnded]:
        ended: list[TransferEnded] = []

        def all_ended() -> bool:
            ended.extend(self.pool.advance())
            return len(ended) >= count

        self.until(all_ended)
        return ended

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            self.mine.agent.notifications()
            self.heard += [data for _, data in self.theirs.agent.notifications()]

    def close(self) -> None:
        self.mine.agent.close()
        self.theirs.agent.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def _plan(mine: list[int], theirs: list[int], max_bytes: int = 1 << 30) -> list[Piece]:
    regions = [
        RegionInfo(f"l{i}", 0, i << 20, PAGE_BYTES, PAGE_BYTES, NUM_BLOCKS, 0)
        for i in range(LAYERS)
    ]

    def table(blocks: list[int]) -> tuple[BlockArray, ...]:
        return (np.array(blocks, dtype=np.int32),)

    (pages,) = same_pages(regions, NUM_BLOCKS).parts
    return plan(pages, UNTOLD, table(mine), table(theirs), max_bytes)


MINE, THEIRS = [3, 4, 5, 9], [20, 21, 8, 7]


def test_a_write_puts_blocks_where_they_belong(ends: Ends) -> None:
    before = ends.theirs.pages.copy()
    ends.start("WRITE", _plan(MINE, THEIRS))
    (ended,) = ends.finish()
    assert ended.failure is None
    assert ended.size == TransferSize(len(MINE) * LAYERS * PAGE_BYTES, 3 * LAYERS)
    assert (ended.operation, ended.peer, ended.registration_id) == (
        "WRITE",
        ends.peer,
        R,
    )
    assert 0 < ended.post_seconds <= ended.seconds
    assert len(ends.pool) == 0
    before[:, THEIRS] = ends.mine.pages[:, MINE]
    ends.until(lambda: bool(ends.heard))
    assert np.array_equal(ends.theirs.pages, before)
    assert ends.heard == [f"0/1/{ended.size.bytes}".encode()]


def test_a_read_fetches_blocks(ends: Ends) -> None:
    before = ends.mine.pages.copy()
    ends.start("READ", _plan(MINE, THEIRS))
    (ended,) = ends.finish()
    assert ended.failure is None
    before[:, MINE] = ends.theirs.pages[:, THEIRS]
    assert np.array_equal(ends.mine.pages, before)


def test_each_piece_brings_its_news_and_the_total(ends: Ends) -> None:
    block = LAYERS * PAGE_BYTES
    mine, theirs = list(range(16)), list(range(31, 15, -1))
    ends.start("WRITE", _plan(mine, theirs, block))
    (ended,) = ends.finish()
    assert ended.size.bytes == 16 * block
    ends.until(lambda: len(ends.heard) == 16)
    news = sorted(tuple(map(int, data.split(b"/"))) for data in ends.heard)
    assert news == [(seq, 16, block) for seq in range(16)]
    assert np.array_equal(ends.theirs.pages[:, theirs], ends.mine.pages[:, mine])


def test_several_transfers_are_under_way_together(ends: Ends) -> None:
    for index in range(8):
        ends.start("WRITE", _plan([index], [index + 8]), f"r{index}")
    assert len(ends.pool) == 8
    assert ends.pool.uses(ends.peer)
    assert not ends.pool.uses(AgentName("other"))
    ended = ends.finish(8)
    assert {end.registration_id for end in ended} == {f"r{i}" for i in range(8)}
    assert not ends.pool.uses(ends.peer)
    assert np.array_equal(ends.theirs.pages[:, 8:16], ends.mine.pages[:, :8])


def test_nothing_is_posted_for_a_peer_that_is_given_up(ends: Ends) -> None:
    before = ends.theirs.pages.copy()
    ends.start("WRITE", _plan(MINE, THEIRS))
    ends.pool.fail_peer(AgentName("other"), "lost")
    ends.pool.fail_peer(ends.peer, "lost")
    (ended,) = ends.finish()
    assert (ended.failure, ended.size) == ("lost", TransferSize())
    assert np.array_equal(ends.theirs.pages, before)


def test_what_is_posted_ends_when_no_more_is(ends: Ends) -> None:
    ends.start("WRITE", _plan(MINE, THEIRS, LAYERS * PAGE_BYTES))
    ends.pool.post_no_more()
    (ended,) = ends.finish()
    assert "shutting down" in (ended.failure or "")


def test_a_post_that_fails_ends_the_transfer(ends: Ends) -> None:
    # No such page: the other side described fewer than the indices reach.
    few = [msgspec.structs.replace(r, num_blocks=2) for r in ends.theirs.info.regions]
    ends.remote = ends.mine.agent.prepare(whole_pages(few), "DRAM", ends.peer)
    ends.start("WRITE", _plan(MINE, THEIRS))
    (ended,) = ends.finish()
    assert (ended.failure or "").startswith("WRITE failed")
    assert ended.size == TransferSize()
    assert len(ends.pool) == 0


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_transfer_with_a_failed_piece_ends_with_its_last(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    agent = ends.mine.agent
    post, posted, running = agent.post, list[object](), True

    def post_and_run(*args: Any) -> tuple[object, TransferState]:
        handle, _ = post(*args)
        posted.append(handle)
        return handle, TransferState.RUNNING

    def check(handle: object) -> TransferState:
        if handle is posted[0]:
            return TransferState.FAILED
        return TransferState.RUNNING if running else TransferState.DONE

    monkeypatch.setattr(agent, "post", post_and_run)
    monkeypatch.setattr(agent, "check", check)
    ends.pool = TransferPool(agent, settle=0.0)
    ends.start(operation, _plan(MINE, THEIRS, LAYERS * PAGE_BYTES))
    for _ in range(5):
        assert list(ends.pool.advance()) == []
        assert ends.pool.uses(ends.peer)
    running = False
    (ended,) = ends.finish()
    assert (ended.failure or "").startswith(f"{operation} failed")
    assert ended.size == TransferSize()


def test_memory_that_was_not_registered_is_refused(ends: Ends) -> None:
    elsewhere = [
        msgspec.structs.replace(r, address=r.address + (1 << 30))
        for r in ends.theirs.info.regions
    ]
    with pytest.raises(AgentError):
        ends.mine.agent.prepare(whole_pages(elsewhere), "DRAM", ends.peer)


def test_a_message_needs_no_transfer(ends: Ends) -> None:
    ends.mine.agent.notify(ends.peer, b"hello")
    ends.until(lambda: bool(ends.heard))
    assert ends.heard == [b"hello"]


def test_rubbish_is_no_peer(ends: Ends) -> None:
    for rubbish in (b"", b"rubbish", b"nixlSerDes|" + bytes(100)):
        with pytest.raises(AgentError):
            ends.mine.agent.add_peer(rubbish)
    with pytest.raises(AgentError):
        ends.mine.agent.notify(AgentName("nobody"), b"hello")


def test_a_backend_that_is_missing_is_named() -> None:
    with pytest.raises(AgentError, match="NO_SUCH_BACKEND"):
        Agent(AgentName("a"), ["UCX", "NO_SUCH_BACKEND"], 0, False)


# The other side's program: an agent on the bindings alone, which starts at once.
TARGET = """
import sys, time
import numpy as np
import nixl_cu13._api as api
agent = api.nixl_agent(
    "target", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
)
pages = np.zeros(int(sys.argv[1]), dtype=np.uint8)
extent = [(pages.ctypes.data, pages.nbytes, 0, "")]
agent.register_memory(agent.get_reg_descs(extent, "DRAM"))
print("ready", pages.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
while True:
    agent.get_new_notifs()
    time.sleep(0.001)
"""


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_peer_that_is_killed_ends_the_transfers_with_it(operation: str) -> None:
    mine = Memory("mine", Mode.PUSH)
    command = [sys.executable, "-c", TARGET, str(mine.pages.nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as target:
        try:
            _transfer_and_kill(mine, target, operation)
        finally:
            target.kill()
    mine.agent.close()


def _transfer_and_kill(
    mine: Memory, target: "subprocess.Popen[str]", operation: str
) -> None:
    assert target.stdout is not None
    line = next(line for line in target.stdout if line.startswith("ready"))
    _, start, metadata = line.split()
    peer = mine.agent.add_peer(bytes.fromhex(metadata))
    size = NUM_BLOCKS * PAGE_BYTES
    regions = [
        msgspec.structs.replace(region, address=int(start) + index * size)
        for index, region in enumerate(mine.info.regions)
    ]
    local = mine.agent.prepare(whole_pages(mine.info.regions), "DRAM", None)
    remote = mine.agent.prepare(whole_pages(regions), "DRAM", peer)
    pool = TransferPool(mine.agent)

    def transfer() -> TransferEnded:
        pool.start(
            operation, peer, R, 0, local, remote, _plan(MINE, THEIRS), lambda *_: b"x"
        )
        end = time.monotonic() + 30
        while not (ended := list(pool.advance())):
            assert time.monotonic() < end
            mine.agent.notifications()
        return ended[0]

    assert transfer().failure is None
    target.kill()
    target.wait()
    started = time.monotonic()
    ended = transfer()
    # Its end is a proof for the peer, which may have bytes of it in its sockets.
    settled = time.monotonic() - started >= SETTLE_SECONDS
    assert settled or operation == "READ"
    assert (ended.failure or "").startswith(f"{operation} failed")
    assert ended.size == TransferSize()
    assert len(pool) == 0
    mine.agent.remove_peer(peer)
