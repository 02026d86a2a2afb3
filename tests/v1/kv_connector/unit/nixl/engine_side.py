# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that the scheduler side works with, real but small."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
BLOCKS = 32

STOPPED = RequestStatus.FINISHED_STOPPED
LENGTH = RequestStatus.FINISHED_LENGTH_CAPPED
ABORTED = RequestStatus.FINISHED_ABORTED
ERROR = RequestStatus.FINISHED_ERROR


def pool() -> BlockPool:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)


_TABLES: dict[str, KVCacheBlocks] = {}
"""The blocks of requests, as :func:`step` was told last."""


def tables(name: str) -> tuple[Sequence[KVCacheBlock], ...]:
    """The blocks that a request has."""
    found: tuple[Sequence[KVCacheBlock], ...] = _TABLES[name].blocks
    return found


def manager(blocks: BlockPool) -> Any:
    """What the connector uses of the engine's cache manager."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return SimpleNamespace(
        block_pool=blocks,
        reset_prefix_cache=blocks.reset_prefix_cache,
        get_blocks=_TABLES.__getitem__,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
    )


def request(
    name: str, tokens: int = 40, params: dict[str, Any] | None = None
) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, list(range(1, tokens + 1)), sampling, None)


def allocate(blocks: BlockPool, count: int) -> KVCacheBlocks:
    """Blocks that a request holds."""
    return KVCacheBlocks((blocks.get_new_blocks(count),))


def free(blocks: BlockPool, held: KVCacheBlocks) -> None:
    """The request gives its blocks back."""
    blocks.free_blocks(reversed(held.blocks[0]))


def available(blocks: BlockPool) -> int:
    """Free blocks; all of them when nothing is held."""
    count: int = blocks.get_num_free_blocks()
    return count


def step(
    *,
    new: Sequence[tuple[Request, int, int]] = (),
    running: Sequence[tuple[Request, int, int]] = (),
    tables: dict[str, KVCacheBlocks] | None = None,
) -> SchedulerOutput:
    """What is scheduled: requests with their computed and their scheduled tokens."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData.from_request(request, ([],)) for request, _, _ in new
    ]
    for data, (_, computed, _) in zip(output.scheduled_new_reqs, new, strict=True):
        data.num_computed_tokens = computed
    cached = CachedRequestData.make_empty()
    cached.req_ids = [request.request_id for request, _, _ in running]
    cached.num_computed_tokens = [computed for _, computed, _ in running]
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = {
        request.request_id: scheduled for request, _, scheduled in (*new, *running)
    }
    _TABLES.clear()
    _TABLES.update(tables or {})
    return output


def finish(request: Request, status: RequestStatus) -> Request:
    request.status = status
    return request
