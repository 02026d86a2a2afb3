# SPDX-License-Identifier: Apache-2.0
"""The connector's settings, parsed once from ``kv_connector_extra_config``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used; the text names key, value and remedy."""


def _bad(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"kv_connector_extra_config[{key!r}] is {value!r}, expected {expected}. "
        "Correct it in --kv-transfer-config."
    )


def _seconds(key: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < math.inf
    ):
        raise _bad(key, value, "a positive number of seconds")
    return float(value)


def _count(minimum: int) -> Callable[[str, object], int]:
    def parse(key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _bad(key, value, f"an integer of at least {minimum}")
        return value

    return parse


def _share(key: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= 1
    ):
        raise _bad(key, value, "a number from 0 to 1")
    return float(value)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _path(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(key, value, "the path of a file")
    return value


def _hosts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, str) and item for item in value
    ):
        raise _bad(key, value, 'a list of hosts or networks such as ["10.0.0.0/8"]')
    return tuple(value)


def _names(key: str, value: object) -> tuple[str, ...]:
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise _bad(key, value, 'a list of NIXL backend names such as ["UCX"]')
    return tuple(value)


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of one connector instance; durations are in seconds.

    Attributes:
        backends: NIXL backends to create, in order of preference.
        num_threads: worker threads of the NIXL backend. With 0 a WRITE or READ is
            posted entirely on the transfer thread. The default is 0 on CPU
            platforms, where data moves inside the posting call anyway, else 4.
        kv_lease_duration: how long a prefill engine keeps computed KV for a decode
            engine that has shown no sign of life.
        push_registration_timeout: how long a decode engine waits for the KV that it
            registered for.
        peer_timeout: silence after which a peer that owes an answer counts as lost.
        handshake_timeout: bound on one exchange over the side channel.
        transfer_thread: run transfers on a thread of their own. Without it they hold
            the forward thread up, and an idle engine answers no peer: for measuring.
        chunked_push: write each chunk of a chunked prefill in the step that computes
            it; otherwise the whole prompt when it is computed.
        push_layer_groups: groups of layers in which the KV of a step is written while
            the step computes the rest; 1 writes it at the step's end. More than 1
            needs piecewise CUDA graphs.
        enable_cross_layers_blocks: ask the engine for a cache layout that keeps a block
            of all layers together, so that it moves as one piece; an engine whose
            attention backend cannot use it warns and does without.
        max_transfer_bytes: largest single NIXL transfer; longer ones are split so
            that a blocking post cannot hold up liveness answers.
        enforce_handshake_compat: refuse a peer of another model, version or backend.
            Differences of memory layout are refused in any case.
        bidirectional_kv_xfer: keep the KV of answers on the decode side, and read it
            back on the prefill side in later turns of a conversation.
        kv_recompute_threshold: fewest tokens for which KV is read back.
        decoder_kv_blocks_ttl: longest life of kept KV that nobody asks for.
        retention_budget: largest share of the cache that kept KV may hold.
        retention_watermark: share of the cache that is kept free of it.
        retention_lookup_timeout: bound on the question what is kept; the request is
            computed here when it has passed.
        side_channel_token_file: file with a secret that all engines and tools of a
            deployment share; a peer without it is not answered.
        allowed_peers: hosts and networks that a decode engine may be told to
            contact by a request; empty allows all.
        engine_ttl: idle time after which the state of a peer engine is dropped.
        handoff_trace_file: file to which each finished hand-off appends a line of
            JSON with its timeline.
    """

    backends: tuple[str, ...] = ("UCX",)
    num_threads: int | None = None
    transfer_thread: bool = True
    kv_lease_duration: float = 30.0
    push_registration_timeout: float = 480.0
    peer_timeout: float = 10.0
    handshake_timeout: float = 5.0
    chunked_push: bool = True
    push_layer_groups: int = 1
    enable_cross_layers_blocks: bool = False
    max_transfer_bytes: int = 64 << 20
    enforce_handshake_compat: bool = True
    kv_recompute_threshold: int = 64
    decoder_kv_blocks_ttl: float = 480.0
    bidirectional_kv_xfer: bool = False
    retention_budget: float = 0.5
    retention_watermark: float = 0.05
    retention_lookup_timeout: float = 1.0
    side_channel_token_file: str | None = None
    allowed_peers: tuple[str, ...] = ()
    engine_ttl: float = 3600.0
    handoff_trace_file: str | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "ConnectorConfig":
        """Read the settings.

        Raises:
            ConfigError: an unknown key or a value of the wrong kind.
        """
        unknown = sorted(set(extra) - set(_PARSERS))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has unknown keys {unknown}. "
                f"Known keys: {sorted(_PARSERS)}."
            )
        values = {key: _PARSERS[key](key, value) for key, value in extra.items()}
        if "decoder_kv_blocks_ttl" in values:
            values.setdefault(
                "push_registration_timeout", values["decoder_kv_blocks_ttl"]
            )
        return cls(**values)


_PARSERS: dict[str, Callable[[str, object], Any]] = {
    "backends": _names,
    "num_threads": _count(0),
    "transfer_thread": _flag,
    "kv_lease_duration": _seconds,
    "push_registration_timeout": _seconds,
    "peer_timeout": _seconds,
    "handshake_timeout": _seconds,
    "chunked_push": _flag,
    "push_layer_groups": _count(1),
    "enable_cross_layers_blocks": _flag,
    "max_transfer_bytes": _count(1),
    "enforce_handshake_compat": _flag,
    "kv_recompute_threshold": _count(0),
    "decoder_kv_blocks_ttl": _seconds,
    "bidirectional_kv_xfer": _flag,
    "retention_budget": _share,
    "retention_watermark": _share,
    "retention_lookup_timeout": _seconds,
    "side_channel_token_file": _path,
    "allowed_peers": _hosts,
    "engine_ttl": _seconds,
    "handoff_trace_file": _path,
}

assert set(_PARSERS) == {field.name for field in fields(ConnectorConfig)}
