# SPDX-License-Identifier: Apache-2.0
"""What carries KV is told in the answer about integrity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from v1.kv_connector.unit.nixl.test_compat import HERE
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.transport_facts import (
    described,
    transport_facts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    RankInfo,
    decode_rank,
)


@dataclass(frozen=True)
class _Sysfs:
    """A folder like ``/sys/class/infiniband``."""

    folder: Path

    def add(self, device: str, driver: str) -> None:
        drivers = self.folder / "drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        device_folder = self.folder / "class" / device / "device"
        device_folder.mkdir(parents=True)
        (device_folder / "driver").symlink_to(drivers)


def test_efa_devices_are_told_from_others(tmp_path: Path) -> None:
    sysfs = _Sysfs(tmp_path)
    for device, driver in (("rdmap0", "efa"), ("rdmap1", "efa"), ("mlx5", "mlx5_core")):
        sysfs.add(device, driver)

    facts = transport_facts(
        ["LIBFABRIC", "UCX"], {"UCX_TLS": "tcp", "HOME": "/"}, tmp_path / "class"
    )

    assert facts == {"backends": "LIBFABRIC,UCX", "efa_devices": "2", "UCX_TLS": "tcp"}


def test_host_without_rdma_devices(tmp_path: Path) -> None:
    facts = transport_facts(["UCX"], {}, tmp_path / "none")

    assert facts == {"backends": "UCX", "efa_devices": "0"}


def test_rank_is_told_as_json() -> None:
    rank = msgspec.structs.replace(HERE, transport={"backends": "UCX"})

    told = json.loads(json.dumps(described(decode_rank(encode(rank)))))

    assert told["transport"] == {"backends": "UCX"}
    assert told["regions"] == len(HERE.regions)
    assert told["block_bytes"] == sum(region.page_bytes for region in HERE.regions)
    assert told["dtype"] == HERE.layout.get("dtype", "")


def test_rank_of_an_engine_that_tells_no_transport() -> None:
    fields = msgspec.msgpack.decode(encode(HERE))[:-1]
    assert len(fields) == len(RankInfo.__struct_fields__) - 1

    rank = decode_rank(msgspec.msgpack.encode(fields))

    assert rank.transport == {}
    assert described(rank)["transport"] == {}
