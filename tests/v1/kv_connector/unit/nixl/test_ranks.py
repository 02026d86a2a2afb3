# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself, on the wire."""

import msgspec
import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName, EngineId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
    WireError,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    MAX_RANK_BYTES,
    Plane,
    ProcessInfo,
    RankInfo,
    RegionInfo,
    decode_rank,
)

PLANE = Plane(0, 1, 64, 16, 4)
RANK = RankInfo(
    protocol=PROTOCOL_VERSION,
    engine_id=EngineId("engine"),
    agent_name=AgentName("engine:0"),
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    block_size=16,
    mem_type="DRAM",
    agent_metadata=b"metadata",
    regions=(
        RegionInfo("l0", 0, 4096, 64, 64, 10, 0, planes=(Plane(0, 1, 64, 16, 4),)),
    ),
    compat={"model": "m"},
    layout={"dtype": "float32"},
    process=ProcessInfo("boot", 1, 2),
)


def test_a_rank_is_described_on_the_wire() -> None:
    assert decode_rank(encode(RANK)) == RANK


def test_a_huge_description_is_not_read() -> None:
    with pytest.raises(WireError, match=f"exceeds {MAX_RANK_BYTES}"):
        decode_rank(bytes(MAX_RANK_BYTES + 1))


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "x" * 513])
@pytest.mark.parametrize("field", ["engine_id", "agent_name"])
def test_names_are_short_and_of_one_line(field: str, name: str) -> None:
    changed = msgspec.structs.replace(RANK, **{field: name})
    with pytest.raises(WireError, match="not a rank description"):
        decode_rank(encode(changed))
