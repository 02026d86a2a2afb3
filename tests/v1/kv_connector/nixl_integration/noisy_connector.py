# SPDX-License-Identifier: Apache-2.0
"""Connectors that spoil the KV they hand off; loaded by engines of the tests only.

Where an answer stays right although its KV was spoilt, the KV was not used.
"""

from collections.abc import Mapping

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
    NixlPushConnector,
)

SPOIL_PREFIX = "spoil-"
"""Hand-offs whose ``transfer_id`` begins so are spoilt; all others are not."""


class _Noise:
    """Overwrites the blocks of an offer with noise of their own scale."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())
        self._generator = torch.Generator().manual_seed(0)

    def apply(self, metadata: NixlConnectorMetadata) -> None:
        for offer in metadata.offers:
            if not offer.transfer_id.startswith(SPOIL_PREFIX):
                continue
            blocks = torch.from_numpy(offer.complete().blocks[0].astype("int64"))
            for cache in self._caches:
                kept = cache[blocks]
                noise = torch.randn(kept.shape, generator=self._generator)
                cache[blocks] = noise.to(kept.dtype) * kept.std()


class NoisyPushConnector(NixlPushConnector):
    """Spoils KV before it is pushed."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._noise = _Noise(kv_caches)

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlConnectorMetadata)
        self._noise.apply(metadata)
        super().wait_for_save()


class NoisyPullConnector(NixlPullConnector):
    """Spoils KV before it is offered to be pulled."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._noise = _Noise(kv_caches)

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlConnectorMetadata)
        self._noise.apply(metadata)
        super().wait_for_save()
