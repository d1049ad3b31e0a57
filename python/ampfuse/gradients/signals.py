"""The facts about gradients with which an optimizer steps, in one value, `Signals`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse._arguments import described
from ampfuse.gradients.backward_norms import BackwardNorms


class Slot:
    """The attribute in which a scaler passes its signals while an optimizer steps.

    The compiler traces it, which it does not do with attributes of optimizers.
    """

    def __init__(self) -> None:
        self.signals: Signals | None = None


class Signals(NamedTuple):
    """The facts that a scaler, the program or a backward pass has found out about gradients."""

    grad_scale: Tensor | None = None
    """The factor by which the gradients are still multiplied, or None for 1."""
    found_inf: Tensor | None = None
    """If this flag is not 0, the step is skipped. None: nobody has looked for overflow."""
    norms: dict[torch.device, Tensor] | None = None
    """Norms of all gradients on each device, as they are now."""
    backward_norms: BackwardNorms | None = None
    """Norms of some gradients, from the backward pass."""

    @staticmethod
    def read(optimizer: Any) -> "Signals":
        """Return the signals for a step: from a scaler, the program, or a backward pass."""
        given: Signals | None = optimizer._slot.signals
        if given is not None:
            return given.add_attributes(optimizer)
        return Signals(backward_norms=BackwardNorms.find(optimizer)).add_attributes(optimizer)

    def add_attributes(self, optimizer: Any) -> "Signals":
        """Return these signals and those that a program has set as attributes of its optimizer.

        The attributes `grad_scale` and `found_inf` are torch's way, in which its own scaler passes
        both.
        """
        scale = getattr(optimizer, "grad_scale", None)
        flag = getattr(optimizer, "found_inf", None)
        if scale is None and flag is None:
            return self
        for name, value in (("grad_scale", scale), ("found_inf", flag)):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected None or a tensor, got {described(value)}")
        if scale is not None and self.grad_scale is not None:
            scale = self.grad_scale * scale
        if flag is not None and self.found_inf is not None:
            flag = torch.maximum(self.found_inf, flag.to(self.found_inf))
        return Signals(
            self.grad_scale if scale is None else scale,
            self.found_inf if flag is None else flag,
            self.norms,
            self.backward_norms,
        )
