"""What Adam has besides the names of torch's."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse.optim._remainders import exported
from ampfuse.optim._state import renew_master
from ampfuse.optim._written import WrittenParams


class OwnNames(Optimizer):
    """For programs."""

    max_grad_norm: float | None
    process_group: Any
    _written: WrittenParams
    _grad_norm: Tensor | None

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, 0-dim, on their device.

        None before the first step, and without a `max_grad_norm` from the constructor.
        """
        if self.max_grad_norm is None or self._grad_norm is None:
            return None
        return self._grad_norm.clone()

    def master_params(self) -> Iterator[Tensor]:
        """The numbers that are stepped, in the order of the parameters.

        A parameter's float32 master; of remainders the float32 numbers that they stand for, fresh;
        the parameter itself where there is neither.
        """
        for group in self.param_groups:
            for param in group["params"]:
                state = exported(param, self.state.get(param, {}))
                yield state.get("master_param", param)

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Make all masters anew from the parameters, which then have no more bits than these."""
        for param, state in self.state.items():
            if "master_param" in state:
                renew_master(state, param)
        self._written.forget()
