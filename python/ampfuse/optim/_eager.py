"""The inputs of a step that runs eagerly; `_traced.Traced` provides those of a compiled one."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._graphs import is_capturing
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.mistakes import note_step_without_scaler
from ampfuse.optim import _options
from ampfuse.optim._clips import grad_norm_tensor
from ampfuse.optim._columns import Columns


class EagerStep:
    """Reads an optimizer's groups, state and signals, and records its steps."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def columns(self, optimizer: Any) -> list[list[Columns]]:
        """Return the columns of each group; create missing state, and check everything."""
        _options.check_groups(self.param_groups, optimizer.defaults)
        optimizer._is_in_graphs = optimizer._is_in_graphs or is_capturing()
        columns: list[list[Columns]] = optimizer._columns.read(
            self.param_groups, optimizer.state, optimizer._spare_masters
        )
        optimizer._written.adopt(columns)
        limits = optimizer._limits(self.param_groups)
        optimizer._grad_norm = grad_norm_tensor(optimizer._grad_norm, limits, columns)
        self._check_before_writing(optimizer, columns)
        return columns

    def _check_before_writing(self, optimizer: Any, columns: list[list[Columns]]) -> None:
        """Check the arguments of several op calls by a skipped step, before any of them writes.

        A call that raises writes nothing itself, but earlier calls would have stepped.
        """
        if not optimizer._columns.may_be_refused(columns):
            return
        for group, of_group in zip(self.param_groups, columns, strict=True):
            for of_device in of_group:
                skip = torch.ones((), dtype=torch.float32, device=of_device.device)
                optimizer._step_columns(group, of_device, None, None, found_inf=skip)
        optimizer._columns.note_check(columns)

    def signals(self, optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return `grad_scale` and `found_inf`, which a scaler or the program has set."""
        grad_scale, found_inf = signals_of(optimizer)
        if grad_scale is None and found_inf is None:
            note_step_without_scaler()
        return grad_scale, found_inf

    def backward_norms(self, optimizer: Any) -> BackwardNorms | None:
        """Return norms that were computed during backward."""
        return None if is_capturing() else optimizer._backward_norms

    def finish(self, optimizer: Any, columns: list[list[Columns]]) -> None:
        """Record the step that was just taken."""
        optimizer._columns.note_step()
        optimizer._written.note_step(columns)


def signals_of(optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return `grad_scale` and `found_inf`: a compiled scaler's, or else the optimizer's attributes.

    A compiled scaler may call a step that runs eagerly.
    """
    source = optimizer if optimizer._traced.found_inf is None else optimizer._traced
    signals = getattr(source, "grad_scale", None), getattr(source, "found_inf", None)
    for name, signal in zip(("grad_scale", "found_inf"), signals, strict=True):
        if signal is not None and not isinstance(signal, Tensor):
            raise TypeError(f"{name}: expected None or a tensor, got {_options.described(signal)}")
    return signals
