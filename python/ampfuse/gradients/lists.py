"""Lists of gradients on one device, and the parameters that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampfuse._graphs import eager_only, traced_as
from ampfuse.gradients.shards import Sharding


@dataclass
class GradientList:
    """Gradients on one device, as kernels take them."""

    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    shardings: Sequence[Sharding | None] = ()  # one per gradient; empty if all are plain tensors


@eager_only  # the compiler cannot trace is_conj()
def resolve_conjugate_grad(param: Tensor) -> None:
    """Replace a gradient that is a conjugate view, which no operator writes, by its own tensor.

    Autograd makes such gradients of complex parameters.
    """
    if param.grad is not None and param.grad.is_conj():
        param.grad = param.grad.resolve_conj()


def _traced_groups_of(optimizer: Any) -> list[dict[str, Any]]:
    if not hasattr(optimizer, "_traced"):
        return optimizer.param_groups  # type: ignore[no-any-return]
    optimizer._traced.begin()
    return optimizer._traced.param_groups  # type: ignore[no-any-return]


@traced_as(_traced_groups_of)
def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups, for code that may be traced."""
    return optimizer.param_groups  # type: ignore[no-any-return]
