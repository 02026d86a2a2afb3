# SPDX-License-Identifier: Apache-2.0
"""Engines that are forked are as apart from each other as those that are not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from handoff_client import side_channel_address
from pd_launcher import Engine, Pair
from pd_processes import group_members
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import query
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    GetRanks,
    Ranks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    decode_rank,
)
from warm_engines import SWITCH_VARIABLE, ForkedProcess

QUESTION_S = 10.0
PROCESSES = {"VLLM::EngineCore", "VLLM::Worker"}


def _rank(engine: Engine) -> RankInfo:
    reply = query(side_channel_address(engine), GetRanks(PROTOCOL_VERSION), QUESTION_S)
    assert isinstance(reply, Ranks)
    (rank,) = reply.ranks
    return decode_rank(rank)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["push"])
@pytest.mark.skipif(
    os.environ.get(SWITCH_VARIABLE) == "0", reason="every engine is started by itself"
)
async def test_two_forks_share_nothing(pair: Pair) -> None:
    ranks = []
    for engine in (pair.prefill, pair.decode):
        assert isinstance(engine._process, ForkedProcess)
        # What ends its group ends all of it.
        titles = {
            (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()
            for pid in group_members(engine.pid)
        }
        assert titles >= PROCESSES
        ranks.append(await asyncio.to_thread(_rank, engine))

    first, second = ranks
    assert first.process != second.process
    # Else one that took the other's address for its own would not be noticed.
    addresses = [{region.address for region in rank.regions} for rank in ranks]
    assert not addresses[0] & addresses[1]
