"""Notices the step whose loss is not finite and makes weights NaN, while the program runs."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._graphs import is_capturing
from ampfuse._host_copy import HostCopy
from ampfuse._nested import params_of
from ampfuse.gradients.mistakes import has_number
from ampfuse.gradients.shards import local
from ampfuse.tools.diagnosis.phases import Listener
from ampfuse.tools.hooks import hook_functions


class Divergence(Listener):
    """Reads losses until `exits` closes. The host waits for weights only if a loss is not finite.

    A scaler skips steps whose gradients are not finite, so a loss alone is no reason for a hint.
    """

    def __init__(self, exits: ExitStack, notify: Callable[[str], None]) -> None:
        self.hint: str | None = None
        """What to do about a loss that has made weights NaN."""
        self._notify = notify
        self._copy = HostCopy()
        self._is_unread = False  # True while a loss is on its way to the host
        self._step = 1  # of the next loss
        self._step_of_copy = 1
        hook_functions(exits, backward=self._followed)

    def _followed(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def followed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not (torch.compiler.is_compiling() or is_capturing() or self._is_unread):
                self._copy_loss(tensors)
            return backward(tensors, *args, **kwargs)

        return followed

    def _copy_loss(self, loss: Any) -> None:
        is_loss = isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1
        if self.hint is None and is_loss and has_number(loss):
            self._copy.send(loss.detach().double())
            self._is_unread, self._step_of_copy = True, self._step

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Read the loss if it has arrived, and look at the weights if it is not finite."""
        self._step = step + 1
        loss = self._copy.number() if self._is_unread else None
        if loss is None:
            return
        self._is_unread = False
        if math.isfinite(loss) or all(map(is_finite, params_of(optimizer))):
            return
        self.hint = (
            f"The loss of step {self._step_of_copy} is {loss}, and weights are no longer finite: "
            "lower the learning rate, or let `python -m ampfuse advise` name what overflows."
        )
        self._notify(self.hint)


def is_finite(param: Tensor) -> bool:
    """Return True unless a parameter, or the part of it on this rank, has an infinity or NaN."""
    return bool(local(param.detach()).isfinite().all())
