"""Samples of gradients and of modules' outputs, by which runs are compared."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._nested import stored_tensors_in
from ampfuse.tools.precision.modules import Modules

FROM_GRADIENT = 2**14  # elements of each parameter's gradient
FROM_OUTPUT = 2**12

# For each parameter with a gradient that is not zero: elements of the gradient, and the number of
# elements that each stands for.
Gradients = dict[str, tuple[Tensor, float]]
# For each module, elements of its first input and of its first output.
Outputs = dict[str, tuple[Tensor | None, Tensor]]


class Samples:
    """Takes samples after backward, and of the outputs of modules before the first backward."""

    def __init__(self, modules: Modules) -> None:
        self.gradients: list[Gradients] = []
        """For each backward."""
        self.outputs: Outputs = {}
        """By the module's name, in the order in which the calls end."""
        self._modules = modules
        self._before: Gradients = {}

    def take_output(self, name: str, inputs: Any, output: Any) -> None:
        """Sample the first input and output of a module, if no backward has run yet."""
        if self.gradients or name in self.outputs or not torch.is_grad_enabled():
            return
        taken = first_sample(output)
        if taken is not None:
            self.outputs[name] = first_sample(inputs), taken

    def begin_backward(self) -> None:
        """Sample the gradients to which backward adds."""
        self._before = self._present()

    def end_backward(self) -> None:
        """Sample what backward has added to gradients."""
        added = {
            name: (taken - self._before.get(name, (0.0, 0.0))[0], weight)
            for name, (taken, weight) in self._present().items()
        }
        self.gradients.append({name: one for name, one in added.items() if bool(one[0].any())})

    def _present(self) -> Gradients:
        return {
            name: (taken, param.grad.numel() / max(1, taken.numel()))
            for name, param in self._modules.parameters().items()
            if param.grad is not None
            for taken in [sample(param.grad, FROM_GRADIENT)]
        }


def first_sample(values: Any) -> Tensor | None:
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
