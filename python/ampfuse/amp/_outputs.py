"""Losses times a scale, wherever they are."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def scaled(outputs: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """A tensor, or an iterable of them, in containers of the same types, multiplied.

    torch's scaler takes the scale to other devices without waiting, and a CPU reads what it gets at
    once.
    """
    if isinstance(outputs, Tensor):
        return outputs * scale_on(outputs.device)
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    each = (scaled(output, scale_on) for output in outputs)
    return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
