"""The state tensors that a captured graph writes, whatever the optimizer's state is by then."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._nested import params_of
from ampfuse.gradients.shards import local
from ampfuse.optim._columns import Columns
from ampfuse.optim._state import new_master
from ampfuse.optim._written import WrittenParams


class Snapshot:
    """The state of the parameters that have a gradient, as references to its tensors."""

    def __init__(self, optimizer: Any) -> None:
        self._states: list[tuple[Tensor, dict[str, Any]]] = [
            (param, dict(optimizer.state.get(param, {})))
            for param in params_of(optimizer)
            if param.grad is not None
        ]
        self._columns = optimizer._columns
        self._stepped = [self._masters()]
        self._written = WrittenParams()
        self.note_step()

    def note_step(self) -> None:
        """Record that a graph has written the tensors."""
        self._written.note_step(self._stepped)

    def put_back(self, optimizer: Any) -> None:
        """Make the tensors the optimizer's state again, with the values that it has now.

        Masters adopt what other code has written to their parameters.
        """
        if optimizer._columns is not self._columns:  # state was loaded, or a group was added
            for param, tensors in self._states:
                if tensors:
                    put_tensors(optimizer.state[param], tensors, param)
            self._columns = optimizer._columns
        self._written.adopt(self._stepped)

    def _masters(self) -> list[Columns]:
        """Return the parameters that have float32 masters, and these."""
        found: list[Columns] = []
        for param, state in self._states:
            master = state.get("master_param")
            if master is not None and master.dtype == torch.float32:  # not a remainder
                if not found:
                    found.append(Columns(param.device))
                found[0].params.append(local(param))
                found[0].masters.append(local(master))
        return found


def put_tensors(state: dict[str, Any], tensors: dict[str, Any], param: Tensor) -> None:
    """Copy a parameter's state to these tensors, and put them into it."""
    for name, tensor in tensors.items():
        present = state.get(name)
        if present is tensor:
            continue
        if present is not None:
            tensor.copy_(present)
        elif name == "master_param":
            tensor.copy_(new_master(param, tensor.dtype))
        elif name == "ema_param":
            tensor.copy_(param)
        else:
            tensor.zero_()
        state[name] = tensor
