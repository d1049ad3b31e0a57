"""Scales the losses of a program that has no scaler of its own."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


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
        self, losses: Tensor | Sequence[Tensor], grad_tensors: Any, params: Iterable[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses and the gradients with which backward has to be called."""
        losses = [losses] if isinstance(losses, Tensor) else list(losses)
        if isinstance(grad_tensors, Tensor):
            grad_tensors = [grad_tensors]
        if accumulated := gradients_of(params):
            torch._foreach_mul_(accumulated, self.scale)
        return losses, [
            (torch.ones_like(loss) if one is None else one) * self.scale
            for loss, one in zip(losses, grad_tensors or [None] * len(losses), strict=True)
        ]

    def end(self, params: Iterable[Tensor]) -> None:
        """Divide the gradients after backward."""
        if present := gradients_of(params):
            torch._foreach_div_(present, self.scale)

    def hide_overflow(self, params: Iterable[Tensor]) -> None:
        """Remove all gradients if one is not finite, so that the optimizer skips its step."""
        params = [param for param in params if param.grad is not None]
        if not are_finite(gradients_of(params)):
            self.skipped += 1
            self.scale /= 2
            for param in params:
                assert param.grad is not None
                self._hidden.append((param, param.grad))
                param.grad = None

    def restore(self) -> None:
        """Give back the gradients of a step that was skipped."""
        for param, gradient in self._hidden:
            if param.grad is None:
                param.grad = gradient
        self._hidden.clear()


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that these parameters have; of sparse ones, their values."""
    gradients = (param.grad for param in params if param.grad is not None)
    return [one._values() if one.is_sparse else one for one in gradients]


def are_finite(tensors: list[Tensor]) -> bool:
    """Return True if no element of any tensor is NaN or infinite."""
    if not tensors:
        return True
    largest = torch._foreach_norm(tensors, float("inf"))
    return bool(torch.stack([one.to(largest[0].device) for one in largest]).isfinite().all())
