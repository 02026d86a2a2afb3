# SPDX-License-Identifier: Apache-2.0
"""What tells the content of KV, so that a later prompt re-uses what it shares.

The engine's block hashes tell everything that a block's KV depends on: tokens, LoRA,
images, salt. They compare between engines of one hash algorithm and seed. Digests of
the tokens alone serve where that differs, and for the block that is not full, but
only for prompts whose KV depends on nothing else.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from ..digests import token_digest, token_digests
from ..ids import TransferId
from ..wire.blocks import DIGEST_BYTES
from ..wire.questions import Kept

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ContentIndex:
    """Digests of requests' contents.

    Args:
        block_size: tokens per block.
        algorithm: the engine's block hash algorithm.
    """

    def __init__(self, block_size: int, algorithm: str) -> None:
        self._block_size = block_size
        self._algorithm = algorithm
        self._hashing: str | None = None
        self.hash_block_size = block_size

    def describe(
        self, request: "Request", num_tokens: int, name: TransferId, generation: int
    ) -> Kept:
        """The first ``num_tokens`` of a request, for others to compare with."""
        tokens = request.all_token_ids[:num_tokens] if _is_plain(request) else ()
        full = num_tokens // self._block_size
        return Kept(
            name=name,
            generation=generation,
            num_tokens=num_tokens,
            block_size=self._block_size,
            hashing=self.hashing,
            hash_digests=self._hash_digests(request, full),
            token_digests=token_digests(tokens, self._block_size, DIGEST_BYTES),
            tail=token_digest(tokens[full * self._block_size :], DIGEST_BYTES),
        )

    def shared_tokens(self, request: "Request", kept: Kept) -> int:
        """How many tokens of a request's prompt are those of ``kept``, from the start.

        A multiple of the block size, except where all that is kept is shared. Blocks of
        another size are compared by their tokens.
        """
        size = kept.block_size
        if size < 1:
            return 0
        prompt = list(request.prompt_token_ids or ())
        full = kept.num_tokens // size
        plain = _is_plain(request) and bool(kept.token_digests or kept.tail)
        comparable = min(full, len(prompt) // size)
        is_same_size = size == self._block_size
        hashes = self._hash_digests(request, comparable) if is_same_size else b""
        if (
            is_same_size
            and kept.hashing == self.hashing
            and len(kept.hash_digests) == _length(full)
            and len(hashes) == _length(comparable)
        ):
            blocks = _equal(kept.hash_digests, hashes)
        elif plain and len(kept.token_digests) == _length(full):
            blocks = _equal(
                kept.token_digests, token_digests(prompt, size, DIGEST_BYTES)
            )
        else:
            return 0
        tail = prompt[full * size : kept.num_tokens]
        if (
            plain
            and blocks == full
            and kept.tail
            and len(prompt) >= kept.num_tokens
            and token_digest(tail, DIGEST_BYTES) == kept.tail
        ):
            return kept.num_tokens
        return blocks * size // self._block_size * self._block_size

    @property
    def hashing(self) -> str:
        """What must be equal for block hashes to be comparable."""
        if self._hashing is None:
            # The engine chooses its seed after it has made its connector.
            from vllm.v1.core import kv_cache_utils

            seed = hashlib.blake2b(kv_cache_utils.NONE_HASH, digest_size=DIGEST_BYTES)
            self._hashing = f"{self._algorithm}:{seed.hexdigest()}"
        return self._hashing

    def _hash_digests(self, request: "Request", full: int) -> bytes:
        if self.hash_block_size != self._block_size:
            return b""
        return b"".join(
            bytes(block_hash)[:DIGEST_BYTES].ljust(DIGEST_BYTES, b"\0")
            for block_hash in request.block_hashes[:full]
        )


def _is_plain(request: "Request") -> bool:
    """Whether a request's KV depends on its token ids alone."""
    return (
        request.lora_request is None
        and not request.mm_features
        and request.cache_salt is None
        and request.prompt_embeds is None
        and bool(request.prompt_token_ids)
    )


def _length(blocks: int) -> int:
    return blocks * DIGEST_BYTES


def _equal(theirs: bytes, ours: bytes) -> int:
    """How many digests are equal, from the start."""
    count = min(len(theirs), len(ours)) // DIGEST_BYTES
    a, b = (
        np.frombuffer(d, dtype=np.uint8, count=count * DIGEST_BYTES).reshape(
            count, DIGEST_BYTES
        )
        for d in (theirs, ours)
    )
    differs = np.flatnonzero((a != b).any(axis=1))
    return int(differs[0]) if len(differs) else count
