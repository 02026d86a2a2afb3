# SPDX-License-Identifier: Apache-2.0
"""What clients and peers should not say: strategies, and a list of known tricks."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Finished,
    HelloAck,
    LeaseGranted,
    LeaseRequest,
    NotNeeded,
    Ping,
    Pong,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
    Renew,
    Want,
)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


WILD: list[tuple[str, Any]] = [
    ("null", None),
    ("true", True),
    ("false", False),
    ("zero", 0),
    ("one", 1),
    ("negative", -1),
    ("port too large", 65536),
    ("64 bits", 2**64),
    ("a huge integer", 10**5000),
    ("a fraction", 0.5),
    ("a round float", 8100.0),
    ("not a number", float("nan")),
    ("infinity", float("inf")),
    ("no text", ""),
    ("text", "x"),
    ("a number as text", "5600"),
    ("the longest id", "x" * 256),
    ("one more", "x" * 257),
    ("ten megabytes", "x" * 10_000_000),
    ("NUL", "a\0b"),
    ("a new line", "a\nlevel=ERROR b"),
    ("an escape sequence", "\x1b[2J"),
    ("a lone surrogate", "\ud800"),
    ("right to left", "\u202eevil"),
    ("a path", "../../etc/passwd"),
    ("an address with a port", "127.0.0.1:1"),
    ("a list", [1, 2]),
    ("a long list", [0] * 1_000_000),
    ("a deep list", _nested(100_000)),
    ("an object", {"a": 1}),
    ("a wide object", {str(i): i for i in range(100_000)}),
]
"""Values by name, any of which a client can put anywhere into its JSON."""

_DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
_READ = {**_DECODE, "remote_generation": "5", "remote_block_ids": [[1, 2]]}
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}

PARAMS: list[tuple[str, Any]] = [
    ("nothing", {}),
    ("both legs", {"do_remote_prefill": True, "do_remote_decode": True}),
    ("no leg", {"do_remote_prefill": False, "do_remote_decode": False}),
    ("a leg as a word", {**_PREFILL, "do_remote_decode": "true"}),
    ("a leg as a number", {**_DECODE, "do_remote_prefill": 1}),
    ("no address", {"do_remote_prefill": True}),
    ("no port", {**_DECODE, "remote_port": None}),
    ("port 0", {**_DECODE, "remote_port": 0}),
    ("the port as text", {**_DECODE, "remote_port": "5600"}),
    ("no host", {**_DECODE, "remote_host": ""}),
    ("the host as a list", {**_DECODE, "remote_host": ["127.0.0.1"]}),
    ("many ranks", {**_DECODE, "tp_size": 4097}),
    ("no ranks", {**_DECODE, "pp_size": 0}),
    ("no receivers", {**_PREFILL, "num_receivers": 0}),
    ("many receivers", {**_PREFILL, "num_receivers": 4097}),
    ("receivers yes", {**_PREFILL, "num_receivers": True}),
    ("the id as a number", {**_PREFILL, "transfer_id": 7}),
    ("an id of nothing", {**_DECODE, "transfer_id": ""}),
    ("an id too long", {**_PREFILL, "transfer_id": "x" * 257}),
    ("an id of two lines", {**_DECODE, "transfer_id": "a\nb"}),
    ("an id that is no text", {**_PREFILL, "transfer_id": "\ud800"}),
    (
        "fields that nobody knows",
        {**_DECODE, "remote_block_ids": "x", "a": _nested(99)},
    ),
    ("blocks as a word", {**_READ, "remote_block_ids": "x"}),
    ("blocks without groups", {**_READ, "remote_block_ids": []}),
    ("blocks in no group", {**_READ, "remote_block_ids": [1, 2]}),
    ("blocks of many groups", {**_READ, "remote_block_ids": [[1]] * 65}),
    ("a negative block", {**_READ, "remote_block_ids": [[1, -1]]}),
    ("a large block", {**_READ, "remote_block_ids": [[1, 2**31]]}),
    ("a block that is none", {**_READ, "remote_block_ids": [[1, True]]}),
    ("half a block", {**_READ, "remote_block_ids": [[1.5]]}),
    ("a generation as a number", {**_READ, "remote_generation": 5}),
    ("a large generation", {**_READ, "remote_generation": "f" * 16}),
    ("a generation of nothing", {**_READ, "remote_generation": ""}),
    ("many fields", {**_PREFILL, **{f"k{i}": i for i in range(10_000)}}),
    ("an id like that of kept KV", {**_DECODE, "transfer_id": "kept-x"}),
    ("an earlier turn without an address", {**_PREFILL, "retained_transfer_id": "t"}),
    ("an earlier turn as a list", {**_PREFILL, "retained_transfer_id": ["t"]}),
    ("kept KV by its name", {**_DECODE, **_PREFILL, "retained_transfer_id": "kept-x"}),
    ("a release of nothing", {**_DECODE, "release_transfer_id": ""}),
    ("to be kept as a word", {**_DECODE, "retain": "yes"}),
    ("a list", [_DECODE]),
    ("a word", "do_remote_prefill"),
]
"""Whole dicts by name."""

_wild_values = [value for _, value in WILD]
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=40),
        st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=20), inner, max_size=5),
    ),
    max_leaves=20,
)
_keys = st.sampled_from(
    [
        "do_remote_prefill",
        "do_remote_decode",
        "transfer_id",
        "num_receivers",
        "remote_host",
        "remote_port",
        "remote_engine_id",
        "remote_request_id",
        "tp_size",
        "pp_size",
        "remote_block_ids",
        "remote_generation",
        "retained_transfer_id",
        "release_transfer_id",
        "retain",
    ]
)
params = st.builds(
    lambda base, changes: {**base, **changes},
    st.sampled_from([{}, _DECODE, _PREFILL]),
    st.dictionaries(
        _keys, st.one_of(json_values, st.sampled_from(_wild_values)), max_size=4
    ),
)

# ---- messages

TRANSFERS = ["t-open", "t-other"]
KEPT = "kept-open"
REGISTRATIONS = ["r-open", "r-other"]

_edges = [0, 1, 15, 16, 17, 31, 32, 96, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**62]
numbers = st.one_of(
    st.sampled_from([*_edges, -1, -(2**63)]), st.integers(-(2**63), 2**64 - 1)
)
counts = st.one_of(st.sampled_from(_edges[:9]), st.integers(0, 2**31 - 1))
_either = st.one_of(counts, counts, counts, numbers)
_texts = st.one_of(
    st.text(max_size=20), st.just("x" * 512), st.just("x" * 513), st.just("y" * 100_000)
)
# Most messages are about something that there is.
_odd_ids = ["", "x" * 512, "x" * 513, "\0", "\U0010ffff"]
_transfers = st.sampled_from([*TRANSFERS * 5, *[KEPT] * 4, *_odd_ids])
_registrations = st.sampled_from([*REGISTRATIONS * 5, *_odd_ids])
_ids = st.lists(
    st.one_of(st.integers(0, 31), st.sampled_from([-1, 32, 2**31 - 1, -(2**31)])),
    max_size=12,
)
_blocks = st.lists(
    st.one_of(
        _ids.map(lambda ids: np.asarray(ids, dtype="<i4").tobytes()),
        st.binary(max_size=40),
    ),
    max_size=3,
).map(tuple)
_wants = st.one_of(
    st.builds(Want, _either, _either, _either, st.binary(max_size=65)),
    st.just(Want(96, 0, 96, b"digest")),
    st.just(Want(96, 80, 16, b"")),
)
_reasons: Any = st.one_of(st.none(), _texts)

bodies = st.one_of(
    st.builds(HelloAck, _reasons),
    st.builds(Register, _transfers, _registrations, _wants, _blocks),
    st.builds(LeaseRequest, _transfers, _registrations, _wants),
    st.builds(Accepted, _registrations),
    st.builds(LeaseGranted, _registrations, _either, st.floats(), _blocks),
    st.builds(
        Done,
        _registrations,
        _either,
        st.booleans(),
        _either,
        _either,
        _either,
        _either,
    ),
    st.builds(Finished, _registrations),
    st.builds(Refused, _registrations, _texts),
    st.builds(Cancel, _registrations, _transfers),
    st.builds(Cancelled, _registrations),
    st.builds(
        ReadDone,
        _registrations,
        _transfers,
        _either,
        st.booleans(),
        _wants,
        st.binary(max_size=65),
    ),
    st.builds(ReadConfirmed, _registrations, st.booleans()),
    st.builds(NotNeeded, _transfers, _either),
    st.builds(Renew, st.lists(_transfers, max_size=5).map(tuple)),
    st.just(Ping()),
    st.just(Pong()),
)
"""Messages with values inside and outside their bounds; none is the last one."""


def _flip(data: bytes, place: int, value: int) -> bytes:
    changed = bytearray(data)
    changed[place % len(changed)] = value
    return bytes(changed)


def _cut(data: bytes, place: int, value: int) -> bytes:
    return data[: place % len(data)]


def _insert(data: bytes, place: int, value: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([value]) * (1 + value % 9) + data[place:]


def _drop(data: bytes, place: int, value: int) -> bytes:
    place %= len(data)
    return data[:place] + data[place + 1 + value % 9 :]


def _same(data: bytes, place: int, value: int) -> bytes:
    return data


mutations: st.SearchStrategy[Callable[[bytes], bytes]] = st.builds(
    lambda how, place, value: lambda data: how(data, place, value),
    st.sampled_from([_flip, _flip, _cut, _insert, _drop, *[_same] * 5]),
    st.integers(0, 1 << 16),
    st.integers(0, 255),
)
"""Ways to spoil bytes, half of which leave them as they are."""
