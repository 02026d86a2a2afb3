# SPDX-License-Identifier: Apache-2.0
"""Whether two ranks may exchange KV, and if not, what differs."""

from collections.abc import Mapping

from .pages import pair_ranks
from .pairing import PairingError
from .serving import layers_of
from .topology import TopologyError
from .wire.codec import PROTOCOL_VERSION, printable
from .wire.ranks import RankInfo

MAX_PAGES = 2**31 - 1
"""Pages of all regions of a rank: their numbers are int32."""

MAX_RANKS = 4096
"""Ranks of an engine in one direction of parallelism that are believed."""


def refusal(local: RankInfo, remote: RankInfo, enforce: bool) -> str | None:
    """Why ``local`` must not exchange KV with ``remote``; ``None`` if it may.

    The text names each field that differs with both values. With ``enforce``
    off, differences of model and version are let pass, differences in memory
    layout never.
    """
    if local.protocol != PROTOCOL_VERSION or remote.protocol != PROTOCOL_VERSION:
        return _differs("protocol", str(local.protocol), str(remote.protocol))
    problems = _differences(local.layout, remote.layout)
    if enforce:
        problems += _differences(local.compat, remote.compat)
    problems += _impossible(remote) or _region_differences(local, remote)
    return printable("; ".join(problems)) or None


def _impossible(remote: RankInfo) -> list[str]:
    for name in ("tp", "pp"):
        rank, size = getattr(remote, f"{name}_rank"), getattr(remote, f"{name}_size")
        if not 0 <= rank < size <= MAX_RANKS:
            return [f"{name}_rank {rank} of {name}_size {size}, which cannot be"]
    counts = {region.num_blocks for region in remote.regions}
    if not counts:
        return ["the remote rank has no KV cache"]
    if len(counts) > 1 or not 0 < max(counts) <= MAX_PAGES // len(remote.regions):
        return [f"the remote caches have {sorted(counts)[:4]} blocks, which cannot be"]
    return []


def _differs(field: str, local: str, remote: str) -> str:
    return f"{field} differs (local {local}, remote {remote})"


def _differences(local: Mapping[str, str], remote: Mapping[str, str]) -> list[str]:
    return [
        _differs(key, local.get(key, "absent"), remote.get(key, "absent"))
        for key in sorted(set(local) | set(remote))
        if local.get(key) != remote.get(key)
    ]


def _region_differences(local: RankInfo, remote: RankInfo) -> list[str]:
    if local.pp_size == remote.pp_size == 1:
        missing = sorted(layers_of(local) ^ layers_of(remote))
        if missing:
            return [f"layers on one side only: {', '.join(missing[:4])}"]
    # A pipeline stage may share no layer with this rank; what its whole engine lacks
    # is seen where its ranks are known together.
    problems: dict[str, None] = {}
    for gives in (True, False):
        try:
            pair_ranks(local, remote, gives)
        except (PairingError, TopologyError) as error:
            problems[str(error)] = None
    return list(problems)
