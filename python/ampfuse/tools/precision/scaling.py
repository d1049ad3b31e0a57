"""Scales the losses of a program."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


class Scaling:
    """Multiplies losses by a scale, and divides the gradients by it right after backward.

    So the program sees gradients that are not scaled, whatever it does with them, except in hooks
    during backward. As with a GradScaler, a step is skipped if a gradient is not finite, and the
    scale is then halved.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.skipped = 0
        """Steps that were skipped."""
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def begin(
        self, losses: list[Tensor], grad_tensors: Any, params: Iterable[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of the losses with which backward has to be called."""
        if isinstance(grad_tensors, Tensor):
            grad_tensors = [grad_tensors]
        if accumulated := gradients_of(params):
            torch._foreach_mul_(accumulated, self.scale)
        return [
            (torch.ones_like(loss) if one is None else one) * self.scale
            for loss, one in zip(losses, grad_tensors or [None] * len(losses), strict=True)
        ]

    def end(self, params: Iterable[Tensor]) -> None:
        """Divide the gradients after backward."""
        if present := gradients_of(params):
            torch._foreach_div_(present, self.scale)

    def hide_overflow(self, params: list[Tensor]) -> None:
        """Remove all gradients if one is not finite, so that the optimizer skips its step."""
        if get_total_norm(gradients_of(params), math.inf).isfinite():
            return
        self.skipped += 1
        self.scale /= 2
        for param in params:
            if param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def restore(self) -> None:
        """Give back the gradients of a step that was skipped."""
        for param, gradient in self._hidden:
            param.grad = gradient
        self._hidden.clear()


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that these parameters have; of sparse ones, their values."""
    gradients = (param.grad for param in params if param.grad is not None)
    return [one._values() if one.is_sparse else one for one in gradients]
