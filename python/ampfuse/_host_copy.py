"""What the device knows, on the host, without the host waiting for it."""

import ctypes

import torch
from torch import Tensor


class HostCopy:
    """A copy that arrives by itself."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Start copying what the tensor will hold when the device comes to it."""
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        if self._copy is None:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copy.copy_(tensor, non_blocking=True)
        assert self._arrived is not None
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def latest(self) -> Tensor | None:
        """What was sent last, or None while it is on its way."""
        if self._arrived and not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        return self._copy

    def number(self) -> float | None:
        """The number that was sent last, or None while it is on its way.

        It is read from the host's memory, where it has arrived, and torch is not asked.
        """
        copy = self.latest()
        if copy is None:
            return None
        kind = ctypes.c_double if copy.dtype == torch.float64 else ctypes.c_float
        return kind.from_address(copy.data_ptr()).value

    def is_idle(self) -> bool:
        """Whether nothing was sent yet."""
        return self._copy is None

    def wait(self) -> Tensor | None:
        """What was sent last, once it is here; None if nothing was."""
        if self._arrived:
            self._arrived.synchronize()
        return self._copy
