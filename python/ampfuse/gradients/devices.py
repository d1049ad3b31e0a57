"""Devices that have kernels, and 0-dim tensors on several devices."""

from typing import overload

import torch
from torch import Tensor

from ampfuse import _C

SERVED = ("cpu", "cuda") if _C.has_cuda() else ("cpu",)  # torch.compile cannot trace the call


def is_served(device: torch.device) -> bool:
    """Return True if the library was built with kernels for this device."""
    return device.type in SERVED


@overload
def move_to(scalar: Tensor, device: torch.device) -> Tensor: ...
@overload
def move_to(scalar: Tensor | None, device: torch.device) -> Tensor | None: ...
def move_to(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the scalar on the device. The host waits only for a copy from a GPU to the CPU."""
    if scalar is None or scalar.device == device:
        return scalar
    return scalar.to(device, non_blocking=device.type != "cpu")


def largest(flags: list[Tensor]) -> Tensor:
    """Return the maximum of 0-dim tensors, which may be on several devices."""
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
