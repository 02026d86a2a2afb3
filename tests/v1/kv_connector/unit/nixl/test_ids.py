# SPDX-License-Identifier: Apache-2.0
"""New ids."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    new_agent_name,
    new_registration_id,
)


def test_new_ids_are_new() -> None:
    assert len({new_registration_id() for _ in range(100)}) == 100
    engine = EngineId("e")
    names = {new_agent_name(engine, 0) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("e:0:") for name in names)
