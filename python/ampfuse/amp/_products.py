"""Scales losses, and looks whether the scale has an inverse."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampfuse._graphs import traced_as
from ampfuse._host_copy import number_in
from ampfuse.gradients.mistakes import LARGEST_SCALE_WITHOUT_INVERSE, has_number


def _divided_flag(scale: Tensor) -> Tensor:
    return LARGEST_SCALE_WITHOUT_INVERSE // scale  # non-zero for exactly these scales


@traced_as(_divided_flag)
def flag_without_inverse(scale: Tensor) -> Tensor:
    """Return a flag that is not 0 if the scale has no finite inverse.

    Such a scale counts as an overflow, whatever the gradients are. A CPU's scale is read at once,
    since a division takes a twentieth of a small step.
    """
    if not scale.is_cpu or not has_number(scale):
        return _divided_flag(scale)
    return torch.full_like(scale, number_in(scale) <= LARGEST_SCALE_WITHOUT_INVERSE)


def scaled(outputs: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """Return a tensor, or an iterable of tensors, scaled; lists and tuples keep their type.

    torch's scaler copies the scale to other devices without waiting. That is wrong for a CPU, which
    reads the copy at once, perhaps before it has arrived.
    """
    if isinstance(outputs, Tensor):
        return outputs * scale_on(outputs.device)
    # A Sequential and other modules are iterable, too.
    if isinstance(outputs, torch.nn.Module) or not isinstance(outputs, Iterable):
        remedy = ": pass the loss itself, not loss.item()" if isinstance(outputs, float) else ""
        raise ValueError(
            "outputs must be a Tensor or an iterable of Tensors, got "
            f"{type(outputs).__name__}{remedy}"
        )
    each = (scaled(output, scale_on) for output in outputs)
    return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
