# SPDX-License-Identifier: Apache-2.0
"""KV-cache hand-off between prefill and decode engines over NIXL."""

from .connector import NixlConnector, NixlPullConnector, NixlPushConnector

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
