# SPDX-License-Identifier: Apache-2.0
"""KV-cache hand-off between prefill and decode engines over NIXL."""

from .connector import NixlConnector, NixlPullConnector, NixlPushConnector
from .stats import NixlKVConnectorStats

__all__ = [
    "NixlConnector",
    "NixlKVConnectorStats",
    "NixlPullConnector",
    "NixlPushConnector",
]
