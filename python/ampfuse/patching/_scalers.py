"""`torch.amp.GradScaler` and its older names: ours."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ampfuse.amp import GradScaler
from ampfuse.patching._stand_in import StandIn
from ampfuse.patching._usage import Usage

USAGE = Usage("scaler")


class _CudaGradScaler(GradScaler, torch.cuda.amp.grad_scaler.GradScaler):
    """What `torch.cuda.amp.GradScaler` is besides, for those who ask with isinstance."""


class _CpuGradScaler(GradScaler, torch.cpu.amp.grad_scaler.GradScaler):
    """The same for `torch.cpu.amp.GradScaler`."""


class Recording:
    """Of scalers that are made while it is on: they remember, and the last ones are remembered."""

    def __init__(self) -> None:
        self.history = 0  # how many updates each remembers
        self.made = 0
        self.scalers: deque[GradScaler] = deque(maxlen=16)

    def note(self, scaler: GradScaler) -> None:
        if self.history and scaler.is_enabled():
            self.made += 1
            # What it knows, and not itself: while it is alive, losses expect its scale.
            known = object.__new__(type(scaler))
            known.__dict__ = vars(scaler)
            self.scalers.append(known)


RECORDING = Recording()

# Torch's class, ours, and the device that its name says.
KINDS: list[tuple[Any, type[GradScaler], str | None]] = [
    (torch.amp.grad_scaler.GradScaler, GradScaler, None),
    (torch.cuda.amp.grad_scaler.GradScaler, _CudaGradScaler, "cuda"),
    (torch.cpu.amp.grad_scaler.GradScaler, _CpuGradScaler, "cpu"),
]


def stand_in(
    original: Any, ours: type[GradScaler], device: str | None, is_on: Callable[[], bool]
) -> Any:
    """For one of these classes."""
    return StandIn.of(original, is_on, partial(_make, original, ours, device))


def _make(original: Any, ours: type[GradScaler], device: str | None, given: dict[str, Any]) -> Any:
    named: dict[str, Any] = {}
    if device is not None:
        original(enabled=False)  # which says that the name is deprecated
        named["device"] = device
    try:
        scaler = ours(**named, **given, history=RECORDING.history)
    except (TypeError, ValueError) as error:
        USAGE.leave_to_torch(f"{original.__module__}.GradScaler", str(error))
        return original(**given)
    USAGE.serve()
    RECORDING.note(scaler)
    return scaler
