# SPDX-License-Identifier: Apache-2.0
"""What carries a rank's KV, told to people and tools; nothing is decided by it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .wire.codec import printable
from .wire.ranks import RankInfo

_TOLD_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "FI_EFA_IFACE")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_EFA_DRIVER = "efa"


def transport_facts(
    backends: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    devices: Path = _RDMA_DEVICES,
) -> dict[str, str]:
    """The NIXL backends of an agent, and what decides which way they take.

    ``efa_devices`` counts what LIBFABRIC opens as a rail each unless told otherwise;
    how many it did open is only in its log. Variables that are not set are left out.
    """
    facts = {"backends": ",".join(backends), "efa_devices": str(_count_efa(devices))}
    facts.update({k: environment[k] for k in _TOLD_VARIABLES if k in environment})
    return facts


def described(rank: RankInfo) -> dict[str, object]:
    """A rank in types that JSON has; ``block_bytes`` are those of one block id."""
    layout = {key: printable(value) for key, value in rank.layout.items()}
    return {
        "tp_rank": rank.tp_rank,
        "tp_size": rank.tp_size,
        "pp_rank": rank.pp_rank,
        "pp_size": rank.pp_size,
        "memory": rank.mem_type,
        "block_size": rank.block_size,
        "regions": len(rank.regions),
        "block_bytes": sum(region.page_bytes for region in rank.regions),
        "dtype": layout.get("dtype", ""),
        "transport": dict(rank.transport),
    }


def _count_efa(devices: Path) -> int:
    drivers = (device / "device" / "driver" for device in devices.glob("*"))
    return sum(driver.resolve().name == _EFA_DRIVER for driver in drivers)
