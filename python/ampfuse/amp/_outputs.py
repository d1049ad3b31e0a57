"""Multiplies losses on any device by the scale."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def scaled(outputs: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """Return a tensor, or an iterable of tensors, multiplied; lists and tuples keep their type.

    torch's scaler copies the scale to other devices without waiting. That is wrong for a CPU, which
    reads the copy at once, perhaps before it has arrived.
    """
    if isinstance(outputs, Tensor):
        return outputs * scale_on(outputs.device)
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    each = (scaled(output, scale_on) for output in outputs)
    return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
