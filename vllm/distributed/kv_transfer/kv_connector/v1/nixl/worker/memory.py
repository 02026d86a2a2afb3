# SPDX-License-Identifier: Apache-2.0
"""Which memory is registered with NIXL, and what NIXL calls it.

It follows from what the platform says of itself and from where the cache tensors are,
not from what the platform is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.platforms.interface import Platform

from ..config import ConfigError

HOST = "cpu"
"""What torch, and ``kv_buffer_device``, call the host's own memory."""


@dataclass(frozen=True)
class KvMemory:
    """Where KV is while it moves.

    ``mem_type`` is NIXL's name for it.
    """

    mem_type: str


def kv_memory(platform: Platform, device: torch.device, buffer: str) -> KvMemory:
    """The memory for caches on ``device`` where ``kv_buffer_device`` is ``buffer``.

    Raises:
        ConfigError: that buffer is not supported.
    """
    declared = platform.get_nixl_memory_type()
    if device.type == HOST:
        # There is nothing but the host's memory, whatever the buffer is called.
        return KvMemory(declared or "DRAM")
    supported = buffers(platform)
    if buffer not in supported:
        raise ConfigError(
            f"kv_buffer_device is {buffer!r} on a {platform.device_type!r} platform, "
            f"which supports {', '.join(supported)}"
        )
    if buffer == HOST:
        raise ConfigError(
            f"kv_buffer_device is {HOST!r} on a {platform.device_type!r} platform, but "
            "KV is not staged on the host; use the platform's own memory"
        )
    return KvMemory(declared or "VRAM")


def buffers(platform: Platform) -> tuple[str, ...]:
    """The values of ``kv_buffer_device`` that a platform supports.

    Where it does not say so, they are its own memory.
    """
    device = platform.device_type
    told: tuple[str, ...] | None = platform.get_nixl_supported_devices().get(device)
    return (device,) if told is None else told


def device_of(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> torch.device:
    """The device that the caches are on; layers are on one."""
    cache = next(iter(kv_caches.values()))
    return (cache if isinstance(cache, torch.Tensor) else cache[0]).device
