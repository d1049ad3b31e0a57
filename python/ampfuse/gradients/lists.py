"""Lists of gradients on one device, and the parameters that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ampfuse._graphs import eager_only
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
