"""The scaler whose scale a loss is to expect where nobody says which."""

import weakref
from typing import Any

import torch
from torch import Tensor

_scalers: "list[weakref.ref[Any]]" = []  # that are enabled and alive, the oldest first


def note(scaler: Any) -> None:
    """A scaler was made."""
    _scalers.append(weakref.ref(scaler, _scalers.remove))


def active_scale(device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The scale of the newest scaler that is alive and has been used there.

    Half gradients that were formed for a scale far below their own would be zeros: for logits of
    that dtype there must be no doubt, and no other scaler.
    """
    scalers = [scaler for reference in _scalers if (scaler := reference()) is not None]
    if dtype == torch.float16 and len(scalers) > 1:
        return None
    for scaler in reversed(scalers):
        scale: Tensor | None = scaler._scale
        if scale is not None and scale.device == device:
            return scale
    return None
