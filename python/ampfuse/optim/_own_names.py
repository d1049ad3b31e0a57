"""Public names of Adam that torch's class does not have."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse.optim._remainders import exported
from ampfuse.optim._state import renew_master
from ampfuse.optim._written import WrittenParams


class OwnNames(Optimizer):
    """Properties and methods for programs that torch's Adam does not have."""

    max_grad_norm: float | None
    process_group: Any
    _written: WrittenParams
    _grad_norm: Tensor | None

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, 0-dim, on their device.

        It is None before the first step, and if the constructor got no `max_grad_norm`.
        """
        if self.max_grad_norm is None or self._grad_norm is None:
            return None
        return self._grad_norm.clone()

    def master_params(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the full precision, in the order of the parameters.

        This is a parameter's float32 master, a new float32 tensor if the parameter has a remainder,
        or else the parameter itself.
        """
        for group in self.param_groups:
            for param in group["params"]:
                state = exported(param, self.state.get(param, {}))
                yield state.get("master_param", param)

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Set all masters to the parameters. The additional bits of the masters are lost."""
        for param, state in self.state.items():
            if "master_param" in state:
                renew_master(state, param)
        self._written.forget()
