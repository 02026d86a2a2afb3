# SPDX-License-Identifier: Apache-2.0
"""Tells when KV that a forward pass computes may be moved.

A forward pass on an accelerator is only launched when its step goes on. An event
that is recorded on the compute stream behind it passes when its results are in
memory; the transfer thread asks for it, and nobody waits.
"""

import torch

from vllm.platforms import current_platform

from ..orders import Fence


def compute_fence() -> Fence:
    """Tells when the work launched so far on the compute device has finished."""
    if current_platform.device_type == "cpu":
        return lambda: True
    event = torch.Event(device=current_platform.device_type)
    event.record()
    return lambda: bool(event.query())
