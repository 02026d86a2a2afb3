# SPDX-License-Identifier: Apache-2.0
"""Prepared lists for tests of what is planned with them."""

from collections.abc import Sequence

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import Row
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import (
    Lists,
    Shared,
    pair_regions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import RegionInfo

UNTOLD = Want(0, 0, 0, b"")
"""For regions that do not tell how many tokens a page has."""


def same_pages(regions: Sequence[RegionInfo], remote_blocks: int) -> Lists:
    """For two ranks that differ in their numbers of blocks only."""
    return pair_regions(
        Shared(
            region,
            msgspec.structs.replace(region, num_blocks=remote_blocks),
            (0, 0, region.heads),
        )
        for region in regions
    )


def whole_pages(regions: Sequence[RegionInfo]) -> list[Row]:
    """A row for each region."""
    return [
        Row(r.address, r.page_bytes, r.device_id, r.stride, r.num_blocks)
        for r in regions
    ]
