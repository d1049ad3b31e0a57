"""Samples of gradients and of modules' outputs, by which runs are compared."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._nested import stored_tensors_in

FROM_GRADIENT = 2**14  # elements of each parameter's gradient
FROM_OUTPUT = 2**12

# For each parameter with a gradient: elements of the gradient, and the number of
# elements that each stands for.
Gradients = dict[str, tuple[Tensor, float]]
# For each module, elements of its first input and of its first output.
Outputs = dict[str, tuple[Tensor | None, Tensor]]


def sample_gradients(named: dict[str, Tensor]) -> Gradients:
    """Sample the gradients that parameters have."""
    return {
        name: (taken, param.grad.numel() / max(1, taken.numel()))
        for name, param in named.items()
        if param.grad is not None
        for taken in [sample(param.grad, FROM_GRADIENT)]
    }


def subtract(gradients: Gradients, before: Gradients) -> Gradients:
    """Return what a backward pass has added to gradients, without those that are zero."""
    added = {
        name: (taken - before[name][0] if name in before else taken, weight)
        for name, (taken, weight) in gradients.items()
    }
    return {name: one for name, one in added.items() if bool(one[0].any())}


def sample_first(values: Any) -> Tensor | None:
    """Return elements of the first tensor of floating-point numbers, or None."""
    tensors = (one for one in stored_tensors_in(values) if one.is_floating_point())
    first = next(tensors, None)
    return None if first is None else sample(first, FROM_OUTPUT)


def sample(tensor: Tensor, most: int) -> Tensor:
    """Return at most so many elements of a tensor, at positions that depend on its size alone."""
    values = tensor.detach().to_dense().reshape(-1)
    # An even step would miss columns of most matrices.
    step = -(-values.numel() // most) | 1
    return values[::step].to("cpu", torch.float32, copy=True)
