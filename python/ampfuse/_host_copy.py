"""Copies tensors from a device to the host, without making the host wait."""

import ctypes
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A host copy of a tensor, which arrives while the host goes on."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Queue a copy of the tensor on its device's current stream."""
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        if self._copy is None or self._arrived is None:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copy.copy_(tensor, non_blocking=True)
        assert self._arrived is not None
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def latest(self) -> Tensor | None:
        """Return what was sent last, or None if it has not arrived."""
        if self._arrived and not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        return self._copy

    def number(self) -> float | None:
        """Return the number that was sent last, or None if it has not arrived."""
        copy = self.latest()
        return None if copy is None else number_in(copy)

    def __getstate__(self) -> dict[str, Any]:
        """Wait for what was sent last, and return it as the state for pickle and deepcopy."""
        return {"_copy": self.wait(), "_arrived": None}

    def is_unsent(self) -> bool:
        """Return True if nothing was sent yet."""
        return self._copy is None

    def wait(self) -> Tensor | None:
        """Wait for what was sent last and return it; return None if nothing was sent."""
        if self._arrived:
            self._arrived.synchronize()
        return self._copy


def copied_to_host(tensor: Tensor) -> HostCopy:
    """Start copying a tensor to the host."""
    copy = HostCopy()
    copy.send(tensor)
    return copy


def number_in(scalar: Tensor) -> float:
    """Return the number in a tensor on the CPU, of float32 or float64.

    It is read from memory: `item()` is an operator, which the program's modes would intercept.
    """
    kind = ctypes.c_double if scalar.dtype == torch.float64 else ctypes.c_float
    return kind.from_address(scalar.data_ptr()).value
