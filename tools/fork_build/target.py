# SPDX-License-Identifier: Apache-2.0
"""Chooses the target device and, for this machine, its base wheel."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from pathlib import Path

from fork_build.errors import BuildError
from fork_build.pins import Pins, TargetPin, WheelPin

TARGET_VARIABLE = "VLLM_TARGET_DEVICE"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CUDA_LIBRARY = "libcuda.so.1"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded, or its CUDA library can be."""
    if _DRIVER_FILE.exists():
        return True
    try:
        ctypes.CDLL(_CUDA_LIBRARY)
    except OSError:
        return False
    return True


def choose_target(pins: Pins, environ: Mapping[str, str]) -> TargetPin:
    """Return the target that `VLLM_TARGET_DEVICE`, or else the driver, selects.

    Raises:
        BuildError: the variable names a target that is not supported.
    """
    name = environ.get(TARGET_VARIABLE, "").strip().lower()
    if not name:
        name = "cuda" if has_nvidia_driver() else "cpu"
    if name not in pins.targets:
        supported = ", ".join(sorted(pins.targets))
        raise BuildError(
            f"{TARGET_VARIABLE}={name!r} is not supported; use one of: {supported}, "
            "or leave it unset to let the presence of an NVIDIA driver decide"
        )
    return pins.targets[name]


def choose_wheel(
    target: TargetPin, system: str | None = None, machine: str | None = None
) -> WheelPin:
    """Return the pinned wheel for a machine, by default this one.

    Raises:
        BuildError: no wheel is pinned for it.
    """
    system = system or platform.system()
    machine = machine or platform.machine()
    for wheel in target.wheels:
        if wheel.fits(system, machine):
            return wheel
    known = ", ".join(wheel.file for wheel in target.wheels)
    raise BuildError(
        f"no base wheel is pinned for {TARGET_VARIABLE}={target.name} on {system} "
        f"{machine}; pinned are: {known}. Build on one of these machines"
    )
