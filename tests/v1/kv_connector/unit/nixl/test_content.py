# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt are those of kept KV, on real requests and hashes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import TransferId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler.content import (
    ContentIndex,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import DIGEST_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    WireError,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.questions import (
    Found,
    Kept,
    decode_reply,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 16
NAME = TransferId("kept-0")
CONVERSATION = list(range(100, 100 + 45))
"""Two full blocks and 13 tokens."""

Hash = Callable[[Any], bytes]


@pytest.fixture(autouse=True)
def none_hash() -> Iterator[None]:
    missing = object()
    before = getattr(kv_cache_utils, "NONE_HASH", missing)
    init_none_hash(sha256)
    yield
    if before is not missing:
        kv_cache_utils.NONE_HASH = before


@dataclass
class Engine:
    """How an engine identifies content."""

    algorithm: Hash = sha256
    hash_block: int | None = BLOCK
    """``None`` where it computes no hashes at all."""
    block: int = BLOCK

    def __post_init__(self) -> None:
        self.index = ContentIndex(self.block, self.algorithm.__name__)
        self.index.hash_block_size = self.hash_block or self.block

    def request(
        self, prompt: list[int], answer: tuple[int, ...] = (), **extra: Any
    ) -> Request:
        hasher = (
            None
            if self.hash_block is None
            else get_request_block_hasher(self.hash_block, self.algorithm)
        )
        sampling = SamplingParams(max_tokens=1)
        made = Request("r", prompt, sampling, None, block_hasher=hasher, **extra)
        made.append_output_token_ids(list(answer))
        return made

    def keep(
        self, prompt: list[int], answer: tuple[int, ...] = (), **extra: Any
    ) -> Kept:
        request = self.request(prompt, (*answer, 0), **extra)
        return self.index.describe(request, len(prompt) + len(answer), NAME, 1)

    def shared(self, prompt: list[int], kept: Kept, **extra: Any) -> int:
        return self.index.shared_tokens(self.request(prompt, **extra), kept)


HASHED = Engine()
UNHASHED = Engine(hash_block=None)
OTHERS = {
    "no hashes": UNHASHED,
    "another algorithm": Engine(sha256_cbor),
    "finer hashes": Engine(hash_block=8),
    "coarser hashes": Engine(hash_block=32),
}
PAIRS = [
    pytest.param(HASHED, HASHED, id="hashes"),
    *(pytest.param(HASHED, other, id=f"read by {n}") for n, other in OTHERS.items()),
    *(pytest.param(other, HASHED, id=f"kept by {n}") for n, other in OTHERS.items()),
]


def _other_seed(kept: Kept) -> Kept:
    """The same from an engine that has drawn another seed."""
    return msgspec.structs.replace(
        kept, hashing="sha256:other", hash_digests=bytes(len(kept.hash_digests))
    )


def _edit(position: int) -> list[int]:
    edited = CONVERSATION.copy()
    edited[position] += 1
    return edited


@pytest.mark.parametrize(("keeper", "reader"), PAIRS)
@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        pytest.param(CONVERSATION, 45, id="the same"),
        pytest.param([*CONVERSATION, 1, 2, 3], 45, id="longer within the block"),
        pytest.param([*CONVERSATION, *range(40)], 45, id="longer by blocks"),
        pytest.param(CONVERSATION[:44], 32, id="shorter by one"),
        pytest.param(CONVERSATION[:33], 32, id="shorter"),
        pytest.param(CONVERSATION[:31], 16, id="a block and a part"),
        pytest.param(CONVERSATION[:15], 0, id="less than a block"),
        pytest.param([*CONVERSATION[:44], 1, 2], 32, id="another last token"),
        pytest.param(_edit(44), 32, id="the last edited"),
        pytest.param(_edit(32), 32, id="the tail edited"),
        pytest.param(_edit(31), 16, id="the second block edited"),
        pytest.param(_edit(0), 0, id="the first token edited"),
        pytest.param([*CONVERSATION[:16], *CONVERSATION[24:]], 16, id="cut out"),
        pytest.param(CONVERSATION[1:], 0, id="cut at the start"),
        pytest.param(CONVERSATION[16:], 0, id="the first block cut"),
    ],
)
def test_what_is_shared(
    keeper: Engine, reader: Engine, prompt: list[int], shared: int
) -> None:
    kept = keeper.keep(CONVERSATION[:30], tuple(CONVERSATION[30:]))
    assert reader.shared(prompt, kept) == shared


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
@pytest.mark.parametrize(("keeper", "reader"), PAIRS)
def test_short_conversations(keeper: Engine, reader: Engine, tokens: int) -> None:
    kept = keeper.keep(CONVERSATION[:tokens])
    assert kept.num_tokens == tokens
    assert reader.shared(CONVERSATION, kept) == tokens
    assert reader.shared(CONVERSATION[:tokens], kept) == tokens
    assert reader.shared([1, *CONVERSATION], kept) == 0


def test_another_seed_falls_back_on_tokens() -> None:
    kept = _other_seed(HASHED.keep(CONVERSATION))
    assert HASHED.shared(CONVERSATION, kept) == 45
    assert HASHED.shared(_edit(20), kept) == 16


def test_the_seed_is_part_of_what_must_be_equal() -> None:
    first = HASHED.keep(CONVERSATION)
    kv_cache_utils.NONE_HASH = b"another seed"
    second = Engine().keep(CONVERSATION)
    assert first.hashing != second.hashing
    assert first.hash_digests != second.hash_digests
    assert Engine().shared(CONVERSATION, first) == 45


def test_the_token_that_was_sampled_last_is_not_kept() -> None:
    request = HASHED.request(CONVERSATION[:30], (7, 8))
    kept = HASHED.index.describe(request, 31, NAME, 4)
    assert (kept.num_tokens, kept.generation, kept.name) == (31, 4, NAME)
    assert HASHED.shared([*CONVERSATION[:30], 7, 8, 9], kept) == 31


@pytest.mark.parametrize(
    ("block", "prompt", "shared"),
    [
        (32, [*CONVERSATION, 1], 45),
        (32, _edit(44), 32),
        (32, CONVERSATION[:40], 32),
        (32, _edit(20), 0),
        (8, [*CONVERSATION, 1], 45),
        (8, _edit(44), 32),
        (8, _edit(30), 16),
        (8, _edit(5), 0),
    ],
)
def test_blocks_of_another_size_compare_by_their_tokens(
    block: int, prompt: list[int], shared: int
) -> None:
    kept = Engine(block=block, hash_block=block).keep(CONVERSATION)
    assert HASHED.shared(prompt, kept) == shared
    assert HASHED.shared(prompt, kept, **SPECIAL["salt"]) == 0


def _image(name: str, offset: int = 0) -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem.dummy(),
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=offset, length=4),
        )
    ]


SPECIAL: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "pepper"},
    "lora": {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
    "image": {"mm_features": _image("picture")},
}
UNLIKE: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "sugar"},
    "lora": {"lora_request": LoRARequest("other", 2, "/nowhere")},
    "image": {"mm_features": _image("drawing")},
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_more_than_tokens_matters(kind: str) -> None:
    kept = HASHED.keep(CONVERSATION, **SPECIAL[kind])
    assert (kept.token_digests, kept.tail) == (b"", b"")
    # Only full blocks are told by hashes.
    assert HASHED.shared(CONVERSATION, kept, **SPECIAL[kind]) == 32
    assert HASHED.shared(CONVERSATION, kept, **UNLIKE[kind]) == 0
    assert HASHED.shared(CONVERSATION, kept) == 0
    plain = HASHED.keep(CONVERSATION)
    assert HASHED.shared(CONVERSATION, plain, **SPECIAL[kind]) == 0


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("keeper", [HASHED, *OTHERS.values()])
def test_tokens_never_tell_what_more_depends_on(keeper: Engine, kind: str) -> None:
    special = _other_seed(keeper.keep(CONVERSATION, **SPECIAL[kind]))
    plain = _other_seed(keeper.keep(CONVERSATION))
    for reader in (HASHED, *OTHERS.values()):
        assert reader.shared(CONVERSATION, special, **SPECIAL[kind]) == 0
        assert reader.shared(CONVERSATION, special) == 0
        assert reader.shared(CONVERSATION, plain, **SPECIAL[kind]) == 0


def test_an_image_in_the_tail_is_not_taken_for_its_tokens() -> None:
    late: dict[str, Any] = {"mm_features": _image("picture", offset=40)}
    kept = HASHED.keep(CONVERSATION, **late)
    assert HASHED.shared(CONVERSATION, kept) == 32
    assert HASHED.shared(CONVERSATION, kept, **late) == 32


def test_embeddings_are_not_told_by_tokens() -> None:
    embedded = Request(
        "r",
        None,
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=torch.zeros(45, 8),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    kept = HASHED.index.describe(embedded, 45, NAME, 1)
    assert (kept.token_digests, kept.tail) == (b"", b"")
    assert HASHED.shared([0] * 45, kept) == 0
    plain = HASHED.keep([0] * 45)
    assert HASHED.index.shared_tokens(embedded, plain) == 0


counts = st.sampled_from([0, 1, 15, 16, 31, 32, 44, 45, 46, 48, 2**31 - 1])
lengths = st.integers(0, 4 * DIGEST_BYTES + 1)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    num_tokens=counts,
    block_size=st.sampled_from([0, 1, 8, 16, 32, 2**31 - 1]),
    same_hashing=st.booleans(),
    cuts=st.tuples(lengths, lengths, lengths),
    plain=st.booleans(),
)
def test_no_answer_of_a_peer_does_harm(
    num_tokens: int,
    block_size: int,
    same_hashing: bool,
    cuts: tuple[int, int, int],
    plain: bool,
) -> None:
    good = HASHED.keep(CONVERSATION)
    filler = bytes(4 * DIGEST_BYTES)
    hashes, tokens, tail = cuts
    kept = msgspec.structs.replace(
        good,
        num_tokens=num_tokens,
        block_size=block_size,
        hashing=good.hashing if same_hashing else "",
        hash_digests=(good.hash_digests + filler)[:hashes],
        token_digests=(good.token_digests + filler)[:tokens],
        tail=(good.tail + filler)[:tail],
    )
    decoded = decode_reply(encode(Found((kept,))))
    assert decoded == Found((kept,))
    extra = {} if plain else SPECIAL["salt"]
    shared = HASHED.shared(CONVERSATION, kept, **extra)
    assert 0 <= shared <= min(num_tokens, len(CONVERSATION))
    # Its first two blocks and its whole are all that is true of this answer.
    assert shared in ((0, 16, 32, 45) if plain else (0,))


@pytest.mark.parametrize("field", ["num_tokens", "block_size", "generation"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.5, None, "1"])
def test_numbers_that_are_none_are_not_decoded(field: str, value: object) -> None:
    kept = msgspec.structs.replace(HASHED.keep(CONVERSATION), **{field: value})
    with pytest.raises(WireError):
        decode_reply(encode(Found((kept,))))


@pytest.mark.parametrize("name", ["", "x" * 513, "a\nb"])
def test_names_that_are_none_are_not_decoded(name: str) -> None:
    kept = msgspec.structs.replace(HASHED.keep(CONVERSATION), name=name)
    with pytest.raises(WireError):
        decode_reply(encode(Found((kept,))))
