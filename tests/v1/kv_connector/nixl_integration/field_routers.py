# SPDX-License-Identifier: Apache-2.0
"""The ``kv_transfer_params`` that routers of other make send, as they were read.

Names of fields and kinds of values only. Where a field holds what the router makes or
is told, a :class:`Place` stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Literal

Mode = Literal["push", "pull"]


class Place(Enum):
    """What stands for a value of one request."""

    TRANSFER_ID = auto()
    REQUEST_ID = auto()
    ENGINE_ID = auto()
    HOST = auto()
    PORT = auto()


@dataclass(frozen=True)
class Source:
    """Where it was read: a file at a commit, or a pull request that was open then."""

    repository: str
    path: str
    commit: str


@dataclass(frozen=True)
class FieldRouter:
    """One way in which a router drives a hand-off.

    Attributes:
        prefill: the prefill leg's params.
        relayed: fields of P's answer that the decode leg has; ``None``: all.
        added: further params of the decode leg.
        request_id: the form of the ``X-Request-Id`` that both legs have.
        capped: fields of the body that the prefill leg has instead of the client's.
        together: whether the legs go out at the same time.
        conversation: fields of D's answer that the next turn's prefill leg has beside
            its own; empty where the router does not do that.
    """

    source: Source
    mode: Mode
    prefill: Mapping[str, Any]
    relayed: frozenset[str] | None = None
    added: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    request_id: str = "{uuid}"
    capped: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({"max_tokens": 1, "stream": False})
    )
    together: bool = False
    conversation: frozenset[str] = frozenset()


_LLM_D, _DYNAMO, _ROUTER = (
    "llm-d/llm-d-router",
    "ai-dynamo/dynamo",
    "vllm-project/router",
)
_SIDECAR = "pkg/sidecar/proxy"

PLAIN = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What all of them send to P in pull."""

_NAMED = MappingProxyType({**PLAIN, "transfer_id": Place.TRANSFER_ID})

IDENTITY = frozenset(
    {
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "transfer_mode",
        "pp_size",
        "dcp_size",
    }
)
"""What llm-d remembers of an earlier answer of a prefill engine in push."""

IDENTITY_NEEDED = IDENTITY - {"pp_size", "dcp_size"}
"""Without these, strings and numbers, it sends one leg after the other."""

REPLAYED = IDENTITY | {
    "remote_request_id",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
}
"""What llm-d's sidecar copies of D's answer into the next turn's prefill leg."""

FIELD: Mapping[str, FieldRouter] = {
    "llm-d pull": FieldRouter(
        Source(
            _LLM_D,
            f"{_SIDECAR}/connector_nixlv2.go",
            "0545789098a63157c372443db4145d91895977b4",
        ),
        "pull",
        PLAIN,
    ),
    "llm-d push, one after the other": FieldRouter(
        Source(
            _LLM_D,
            f"{_SIDECAR}/connector_nixlv2_push_parallel_test.go",
            "19a613d717cd6a8b81785db530c5854f45c59d6b",
        ),
        "push",
        _NAMED,
        added={"transfer_id": Place.TRANSFER_ID},
    ),
    "llm-d push, both at once": FieldRouter(
        Source(
            _LLM_D,
            f"{_SIDECAR}/nixl_push_identity.go",
            "46fe6af9f67ae8547a38b3dd02e93605b89abcb4",
        ),
        "push",
        _NAMED,
        relayed=IDENTITY,
        added={
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": Place.TRANSFER_ID,
            "remote_request_id": Place.REQUEST_ID,
        },
        together=True,
    ),
    "llm-d pull, bidirectional": FieldRouter(
        Source(
            _LLM_D,
            f"{_SIDECAR}/bidirectional_kv.go",
            "7e99424dac3454746253f8baefe0a1f3c49a8204",
        ),
        "pull",
        PLAIN,
        conversation=REPLAYED,
    ),
    "Dynamo pull": FieldRouter(
        Source(
            _DYNAMO,
            "components/src/dynamo/vllm/kv_connector_protocols.py",
            "690ece459d68dd9ca5741f0334e4207e7ea90c55",
        ),
        "pull",
        PLAIN,
    ),
    "Dynamo push": FieldRouter(
        Source(_DYNAMO, "pull request 13327, its description", "open"),
        "push",
        PLAIN,
        relayed=frozenset(),
        added={
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": Place.ENGINE_ID,
            "remote_request_id": Place.REQUEST_ID,
            "remote_host": Place.HOST,
            "remote_port": Place.PORT,
            "tp_size": 1,
        },
        together=True,
    ),
    "vllm-router": FieldRouter(
        Source(
            _ROUTER,
            "src/routers/http/vllm_pd_router.rs",
            "9da0ea11e02ffdda2d2b2f9716b5a9e61b669877",
        ),
        "pull",
        PLAIN,
        request_id="___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_{uuid}",
    ),
    "AIBrix, connector type shfs": FieldRouter(
        Source(
            "vllm-project/aibrix",
            "pkg/plugins/gateway/algorithms/pd/transfer/shfs.go",
            "064ce84a36843493f99c2852dab79a37ab5018e7",
        ),
        "pull",
        PLAIN,
        added={"remote_host": Place.HOST},
    ),
    "Ray Serve LLM": FieldRouter(
        Source(
            "ray-project/ray",
            "python/ray/llm/_internal/serve/serving_patterns/prefill_decode/pd_server.py",
            "c3cc57069059615a6a2382ed7c9d787e8d5b60fc",
        ),
        "pull",
        PLAIN,
    ),
    "vllm-router, push": FieldRouter(
        Source(
            _ROUTER,
            "src/routers/http/vllm_pd_router.rs",
            "9da0ea11e02ffdda2d2b2f9716b5a9e61b669877",
        ),
        "push",
        PLAIN,
        request_id="___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_{uuid}",
    ),
}
"""By the name that the documentation gives them."""

NO_HANDOFF: Mapping[str, Mapping[str, Any]] = {
    "vllm-router, concurrent dispatch": {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_ready": False,
    },
}
"""Decode legs that our engines compute themselves: they wait for another request that
the base does not have."""


def filled(params: Mapping[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """The params of one request."""
    return {
        key: values[value] if isinstance(value, Place) else value
        for key, value in params.items()
    }


def decode_params(
    router: FieldRouter, answered: Mapping[str, Any], values: Mapping[Place, Any]
) -> dict[str, Any]:
    """The decode leg's params, made from P's answer as the router does."""
    relayed = {
        key: value
        for key, value in answered.items()
        if router.relayed is None or key in router.relayed
    }
    return {**relayed, **filled(router.added, values)}
