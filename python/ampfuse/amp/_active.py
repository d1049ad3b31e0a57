"""The scaler whose scale a loss is to expect where nobody says which."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

_scalers: "list[weakref.ref[Any]]" = []  # that are enabled and alive, the oldest first


def note(scaler: Any) -> None:
    """A scaler was made, or copied."""
    if all(reference() is not scaler for reference in list(_scalers)):
        _scalers.append(weakref.ref(scaler, _scalers.remove))


def _may_be_others() -> bool:
    """Whether programs derive scalers from torch's, of which nothing is told here."""
    kinds = TorchGradScaler.__subclasses__()
    while kinds:
        kind = kinds.pop()
        package = kind.__module__.partition(".")[0]
        if package == "torch":
            kinds += kind.__subclasses__()
        elif package != "ampfuse":
            return True
    return False


def active_scale(device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The scale of the newest scaler that is alive and has been used there.

    Half gradients that were formed for a scale far below their own would be zeros. So logits of
    that dtype are told of none where there are several scalers, or may be; nor of less than 1,
    which is what gradients have that are taken without one. (Torch's scalers that were made before
    patching are not known.)
    """
    # A copy: scalers may die meanwhile.
    scalers = [scaler for reference in list(_scalers) if (scaler := reference()) is not None]
    is_half = dtype == torch.float16
    if is_half and (len(scalers) > 1 or _may_be_others()):
        return None
    for scaler in reversed(scalers):
        scale: Tensor | None = scaler._scale
        if scale is not None and scale.device == device:
            return scale.clamp(min=1) if is_half else scale
    return None
