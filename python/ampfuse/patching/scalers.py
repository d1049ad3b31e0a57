"""Replaces `torch.amp.GradScaler` and its older names."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ampfuse.amp import GradScaler
from ampfuse.gradients.devices import is_served
from ampfuse.patching._usage import Usage

USAGE = Usage("scaler")


class _CudaGradScaler(GradScaler, torch.cuda.amp.grad_scaler.GradScaler):
    """Our scaler with the base class `torch.cuda.amp.GradScaler`."""


class _CpuGradScaler(GradScaler, torch.cpu.amp.grad_scaler.GradScaler):
    """Our scaler with the base class `torch.cpu.amp.GradScaler`."""


# Checkpoints compare these names. Pickle finds the classes by __qualname__, which stays unchanged.
_CudaGradScaler.__name__ = _CpuGradScaler.__name__ = "GradScaler"

CLASSES: dict[Any, type[GradScaler]] = {
    torch.amp.grad_scaler.GradScaler: GradScaler,
    torch.cuda.amp.grad_scaler.GradScaler: _CudaGradScaler,
    torch.cpu.amp.grad_scaler.GradScaler: _CpuGradScaler,
}


original = torch.amp.grad_scaler.GradScaler.__init__
SIGNATURE = inspect.signature(original)


def constructor(is_on: Callable[[], bool]) -> Any:
    """Return the replacement of `torch.amp.GradScaler.__init__`, which the older classes call."""

    @wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        if cls not in CLASSES or not is_on():
            original(self, device, *args, **kwargs)
            if is_on() and not issubclass(cls, GradScaler):  # it may use torch's internals
                name = f"{cls.__module__}.{cls.__qualname__}"
                USAGE.count_fallback(name, "it derives from torch's class")
            return
        try:
            SIGNATURE.bind(self, device, *args, **kwargs)
            if torch.cuda.is_available() and not is_served(torch.device(device)):
                raise ValueError(f"it is for {device}")
            self.__class__ = CLASSES[cls]
            GradScaler.__init__(self, device, *args, **kwargs)
        except (TypeError, ValueError) as error:
            reason = str(error)
        else:
            if self.is_enabled():
                USAGE.count_use()
            return
        self.__class__ = cls
        original(self, device, *args, **kwargs)  # raises torch's error alone, or accepts this
        USAGE.count_fallback(f"{cls.__module__}.GradScaler", reason)

    return init
