# SPDX-License-Identifier: Apache-2.0
"""Tells when KV that a forward pass computes may be moved.

A forward pass on an accelerator is only launched when its step goes on. An event
that is recorded on the compute stream behind it passes when its results are in
memory; the transfer thread asks for it, and nobody waits.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from ..memory import HOST
from ..orders import Fence


def compute_fence(device: torch.device) -> Fence:
    """Tells when the work launched so far on the compute device has finished."""
    if device.type == HOST:
        # The host has done it.
        return lambda: True
    event = torch.Event(device=device)
    event.record()
    return lambda: bool(event.query())


def copy_stream(device: torch.device) -> AbstractContextManager[object]:
    """Where work of the device is launched that the computation is not to delay."""
    if device.type == HOST:
        return nullcontext()
    stream: AbstractContextManager[object] = torch.Stream(device=device)
    return stream
