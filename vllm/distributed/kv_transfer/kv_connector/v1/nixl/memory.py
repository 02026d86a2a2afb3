# SPDX-License-Identifier: Apache-2.0
"""Which memory is registered with NIXL, and what NIXL calls it.

It follows from what the platform says of itself and from where the cache tensors are,
not from what the platform is called.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.platforms.interface import Platform

from .config import ConfigError

HOST = "cpu"
"""What torch, and ``kv_buffer_device``, call the host's own memory."""

_COPIES = ("swap_out_blocks_to_host", "insert_blocks_to_device")


@dataclass(frozen=True)
class KvMemory:
    """Where KV is while it moves.

    Attributes:
        mem_type: NIXL's name for it.
        staged: whether it is a copy on the host of caches that are elsewhere.
    """

    mem_type: str
    staged: bool = False


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
        return KvMemory("DRAM", staged=True)
    return KvMemory(declared or "VRAM")


def buffers(platform: Platform) -> tuple[str, ...]:
    """The values of ``kv_buffer_device`` that a platform supports.

    Where it does not say so, they are its own memory, and the host's if it has
    operations that copy blocks there and back.
    """
    device = platform.device_type
    told: tuple[str, ...] | None = platform.get_nixl_supported_devices().get(device)
    if told is not None:
        return told
    # Asked of the class: an instance answers with None to what it does not have.
    copies = all(hasattr(type(platform), name) for name in _COPIES)
    return (device, HOST) if copies else (device,)


def is_staged(platform: Platform, buffer: str) -> bool:
    """Whether the workers stage KV on the host, as the scheduler side may assume."""
    return buffer == HOST and bool(platform.device_type != HOST)


def device_of(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> torch.device:
    """The device that the caches are on; layers are on one."""
    cache = next(iter(kv_caches.values()))
    return (cache if isinstance(cache, torch.Tensor) else cache[0]).device
