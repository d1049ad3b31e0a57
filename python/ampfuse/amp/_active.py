"""The scaler whose scale a loss is to expect where nobody says which."""

import weakref
from typing import Any

import torch
from torch import Tensor

_scalers: "list[weakref.ref[Any]]" = []  # that are enabled and alive, the oldest first


def note(scaler: Any) -> None:
    """A scaler was made."""
    _scalers.append(weakref.ref(scaler, _scalers.remove))


def active_scale(device: torch.device) -> Tensor | None:
    """The scale of the newest scaler that is alive and has been used there."""
    for reference in reversed(_scalers):
        scaler = reference()
        scale: Tensor | None = None if scaler is None else scaler._scale
        if scale is not None and scale.device == device:
            return scale
    return None
