# SPDX-License-Identifier: Apache-2.0
"""Block ids as bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import (
    blocks_digest,
    pack_blocks,
    unpack_blocks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import WireError


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_block_lists_survive_the_wire(blocks: list[int]) -> None:
    unpacked = unpack_blocks(pack_blocks(blocks))
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == blocks


def test_half_a_block_id_is_refused() -> None:
    with pytest.raises(WireError, match="5 bytes"):
        unpack_blocks(b"12345")


def test_a_digest_tells_groups_and_order_apart() -> None:
    groups = [[[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[2, 1], [3]], [[1, 2, 3]]]
    assert len({blocks_digest(group) for group in groups}) == len(groups)
    assert blocks_digest([[1, 2]]) == blocks_digest([np.array([1, 2])])
