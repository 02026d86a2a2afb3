# SPDX-License-Identifier: Apache-2.0
"""Requests with real block hashes on a real cache manager, for later turns."""

from typing import Any

import torch

from v1.kv_connector.unit.nixl.engine_side import BLOCK, BLOCKS, available
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.content import (
    ContentIndex,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

HISTORY = list(range(1000, 1000 + 5 * BLOCK + 5))
"""What the first turn leaves behind: five full blocks and a part of one."""

NEXT = [*HISTORY, *range(40)]
"""The prompt of the next turn."""


def cache_config(groups: int = 1) -> KVCacheConfig:
    """A cache of BLOCKS blocks, one of which is the null block."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"l{i}"], spec) for i in range(groups)],
    )


def content() -> ContentIndex:
    return ContentIndex(BLOCK, "sha256")


def prompt(
    name: str,
    tokens: list[int],
    params: dict[str, Any] | None = None,
    **sampling: Any,
) -> Request:
    """A request as the engine makes it."""
    extra = {"kv_transfer_params": params}
    return Request(
        name,
        tokens,
        SamplingParams(max_tokens=64, extra_args=extra, **sampling),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class Cache:
    """A cache manager, used as the engine's scheduler uses it."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.manager = KVCacheManager(cache_config(), 4096, BLOCK, BLOCK)

    def cached(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What of a request's prompt is cached: blocks and tokens."""
        found = self.manager.get_computed_blocks(request)
        return found[0], found[1]

    def admit(self, request: Request, external: int = 0) -> KVCacheBlocks | None:
        """Give a waiting request its blocks, if there are enough.

        With ``external`` tokens to be loaded the request is parked.
        """
        blocks, local = self.cached(request)
        new = 0 if external else request.num_tokens - local
        given = self.manager.allocate_slots(
            request,
            new,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=bool(external),
            full_sequence_must_fit=True,
        )
        if given is None:
            return None
        request.num_computed_tokens = local + external
        if external:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        else:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = request.num_tokens
        return self.manager.get_blocks(request.request_id)

    def resume(self, request: Request) -> None:
        """A parked request has been told that its load is over."""
        self.manager.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = RequestStatus.WAITING

    def answer(self, request: Request, tokens: list[int]) -> None:
        """A running request samples tokens; the last one is not computed."""
        for token in tokens:
            if request.num_tokens > request.num_prompt_tokens:
                assert self.manager.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    def table(self, request: Request) -> tuple[list[int], ...]:
        """The blocks that a request holds."""
        ids: tuple[list[int], ...] = self.manager.get_block_ids(request.request_id)
        return ids

    def free(self) -> int:
        return available(self.manager.block_pool)
