# SPDX-License-Identifier: Apache-2.0
"""Which ranks serve which, where stages hold different layers."""

from itertools import product

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import AgentError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName, EngineId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.serving import (
    count_readers,
    idle_of,
    sources_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.topology import TopologyError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    ProcessInfo,
    RankInfo,
    RegionInfo,
)

LAYERS = 4
Ranks = tuple[RankInfo, ...]


def _engine(name: str, tp_size: int, pp_size: int, *heads: int) -> Ranks:
    """An engine of ``LAYERS`` layers, each with a region per entry of ``heads``."""
    each = LAYERS // pp_size
    return tuple(
        RankInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=EngineId(name),
            agent_name=AgentName(f"{name}:{stage}.{rank}"),
            tp_rank=rank,
            tp_size=tp_size,
            pp_rank=stage,
            pp_size=pp_size,
            block_size=16,
            mem_type="DRAM",
            agent_metadata=b"",
            regions=tuple(
                RegionInfo(f"l{layer}.{part}", 0, 0, 64, 64, 8, 0, model_heads=count)
                for layer in range(stage * each, (stage + 1) * each)
                for part, count in enumerate(heads)
            ),
            compat={},
            layout={},
            process=ProcessInfo("", 0, 0),
        )
        for stage, rank in product(range(pp_size), range(tp_size))
    )


def _asked(readers: Ranks, writers: Ranks) -> dict[AgentName, int]:
    asked = {rank.agent_name: 0 for rank in writers}
    for rank in readers:
        for name in sources_of(rank, writers):
            asked[name] += 1
    return asked


SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)]
PAIRS = [pair for pair in product(SHAPES, SHAPES) if 1 in (pair[0][1], pair[1][1])]


@pytest.mark.parametrize("heads", [(1,), (2,), (8,), (4, 1)])
@pytest.mark.parametrize(("reading", "writing"), PAIRS)
def test_three_views_of_who_asks_whom_agree(
    reading: tuple[int, int], writing: tuple[int, int], heads: tuple[int, ...]
) -> None:
    readers = _engine("r", *reading, *heads)
    writers = _engine("w", *writing, *heads)
    asked = _asked(readers, writers)
    for rank in writers:
        if asked[rank.agent_name]:
            assert count_readers(rank, readers[0]) == asked[rank.agent_name]
    told = [name for rank in readers for name in idle_of(rank, writers)]
    assert sorted(told) == sorted(name for name, count in asked.items() if not count)


def test_a_stage_is_asked_for_its_layers_only() -> None:
    (first, *_, last) = _engine("r", 1, 2, 4)
    whole = _engine("w", 1, 1, 4)
    stages = _engine("s", 1, 4, 4)
    assert sources_of(first, whole) == ("w:0.0",)
    assert sources_of(first, stages) == ("s:0.0", "s:1.0")
    assert sources_of(last, stages) == ("s:2.0", "s:3.0")


def test_layers_that_no_stage_holds_are_named() -> None:
    (reader,) = _engine("r", 1, 1, 4)
    with pytest.raises(TopologyError, match=r"only: l2.0, l3.0; .* 1 of its 2"):
        sources_of(reader, _engine("w", 1, 2, 4)[:1])


def test_a_rank_that_was_not_described_is_named() -> None:
    reader = _engine("r", 1, 1, 4)[0]
    with pytest.raises(AgentError, match=r"\(0, 1\)"):
        sources_of(reader, _engine("w", 2, 1, 4)[:1])


def test_heads_that_do_not_divide_are_refused() -> None:
    reader = _engine("r", 1, 1, 4)[0]
    with pytest.raises(TopologyError, match="tensor_parallel_size 3"):
        sources_of(reader, _engine("w", 3, 1, 4))
