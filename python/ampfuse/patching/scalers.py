"""Replaces `torch.amp.GradScaler` and its older names."""

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ampfuse.amp import GradScaler
from ampfuse.gradients.devices import is_served
from ampfuse.patching._class_swap import ClassSwap
from ampfuse.patching._usage import Usage

USAGE = Usage("scaler")


class _CudaGradScaler(GradScaler, torch.cuda.amp.grad_scaler.GradScaler):
    """Our scaler with the base class and the arguments of `torch.cuda.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        GradScaler.__init__(self, "cuda", *args, **kwargs)


class _CpuGradScaler(GradScaler, torch.cpu.amp.grad_scaler.GradScaler):
    """Our scaler with the base class and the arguments of `torch.cpu.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        GradScaler.__init__(self, "cpu", *args, **kwargs)


class Recording:
    """Keeps the last 16 scalers created while recording, each of which records its updates."""

    def __init__(self) -> None:
        self.history = 0  # number of updates that each scaler records; 0: no recording
        self.made = 0
        self.scalers: deque[GradScaler] = deque(maxlen=16)

    def note(self, scaler: GradScaler) -> None:
        """Keep the scaler, if recording."""
        if self.history and scaler.is_enabled():
            self.made += 1
            # Keep a twin that shares the attributes, so that the program's own scaler can be freed.
            twin = object.__new__(type(scaler))
            twin.__dict__ = vars(scaler)
            self.scalers.append(twin)


# __qualname__ stays unchanged, since pickle finds the classes by it.
_CudaGradScaler.__name__ = _CpuGradScaler.__name__ = "GradScaler"

RECORDING = Recording()

KINDS: list[tuple[Any, type[GradScaler]]] = [
    (torch.amp.grad_scaler.GradScaler, GradScaler),
    (torch.cuda.amp.grad_scaler.GradScaler, _CudaGradScaler),
    (torch.cpu.amp.grad_scaler.GradScaler, _CpuGradScaler),
]


def replacement(original: Any, ours: type[GradScaler], is_on: Callable[[], bool]) -> Any:
    """Return the replacement of one of these classes."""
    return ClassSwap.of(original, ours, is_on, partial(_make, original, ours), USAGE)


def _make(original: Any, ours: type[GradScaler], given: dict[str, Any]) -> Any:
    if ours is not GradScaler:  # torch's warning, for the line that creates the scaler
        warnings.warn(original.__init__.__deprecated__, FutureWarning, stacklevel=3)
    device = given.get("device", "cpu" if issubclass(ours, _CpuGradScaler) else "cuda")
    if torch.cuda.is_available() and not is_served(torch.device(device)):
        USAGE.count_fallback(f"{original.__module__}.GradScaler", f"it is for {device}")
        return original(**given)
    try:
        scaler = ours(**given, history=RECORDING.history)
    except (TypeError, ValueError) as error:
        USAGE.count_fallback(f"{original.__module__}.GradScaler", str(error))
        return original(**given)
    USAGE.count_use()
    RECORDING.note(scaler)
    return scaler
