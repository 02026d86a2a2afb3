# SPDX-License-Identifier: Apache-2.0
"""The connector's settings."""

from dataclasses import fields
from typing import Any

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import (
    ConfigError,
    ConnectorConfig,
)


def test_nothing_needs_to_be_set() -> None:
    assert ConnectorConfig.parse({}) == ConnectorConfig()


def test_settings_are_taken_over() -> None:
    config = ConnectorConfig.parse(
        {"backends": ["UCX", "POSIX"], "num_threads": 2, "kv_lease_duration": 5}
    )
    assert config.backends == ("UCX", "POSIX")
    assert config.num_threads == 2
    assert config.kv_lease_duration == 5.0


def test_the_bases_key_sets_how_long_a_decode_request_waits() -> None:
    assert (
        ConnectorConfig.parse({"decoder_kv_blocks_ttl": 7}).push_registration_timeout
        == 7
    )
    both = {"decoder_kv_blocks_ttl": 7, "push_registration_timeout": 9}
    assert ConnectorConfig.parse(both).push_registration_timeout == 9


def test_an_unknown_key_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match="kv_leese") as raised:
        ConnectorConfig.parse({"kv_leese": 1})
    for field in fields(ConnectorConfig):
        assert field.name in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backends", "UCX"),
        ("backends", []),
        ("backends", [1]),
        ("num_threads", -1),
        ("num_threads", True),
        ("num_threads", 1.5),
        ("transfer_thread", "no"),
        ("kv_lease_duration", 0),
        ("kv_lease_duration", "30"),
        ("kv_lease_duration", True),
        ("kv_lease_duration", float("nan")),
        ("push_registration_timeout", -1),
        ("peer_timeout", float("inf")),
        ("handshake_timeout", None),
        ("max_transfer_bytes", 0),
        ("handoff_trace_file", ""),
        ("handoff_trace_file", 1),
        ("enforce_handshake_compat", "false"),
        ("side_channel_token_file", ""),
        ("allowed_peers", "10.0.0.0/8"),
        ("allowed_peers", [""]),
        ("bidirectional_kv_xfer", 1),
        ("retention_budget", 1.5),
        ("retention_watermark", True),
        ("retention_lookup_timeout", 0),
    ],
)
def test_a_bad_value_is_named_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="expected") as raised:
        ConnectorConfig.parse({key: value})
    assert key in str(raised.value)
    assert repr(value) in str(raised.value)
