"""Optimizers that take scale and flag as tensors: they skip on the device, and nobody waits."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from ampfuse import _C
from ampfuse.optim import Adam


def takes_tensors(optimizer: Any) -> bool:
    """Whether it asks for them, in torch's way."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def wants_the_scaler(optimizer: Any) -> bool:
    """Whether a step takes the scaler itself, as torch once had it."""
    if isinstance(optimizer, Adam):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_with_tensors(
    optimizer: Any,
    scale: Tensor | None,
    found_inf: Tensor,
    args: Any,
    kwargs: Any,
) -> Any:
    """`optimizer.step(*args, **kwargs)`, with attributes that are there for its duration.

    `scale`: by which gradients are scaled still, besides the user's own `grad_scale`, if there is
    one.

    Inside `torch.compile` the graph ends before it: such attributes cannot be traced.
    """
    step = _untraced_step if torch.compiler.is_compiling() else _step
    return step(optimizer, scale, found_inf, args, kwargs)


def _step(optimizer: Any, scale: Tensor | None, found_inf: Tensor, args: Any, kwargs: Any) -> Any:
    users_own = getattr(optimizer, "grad_scale", None)
    if scale is not None and users_own is not None:
        optimizer.grad_scale = scale * users_own
    else:
        optimizer.grad_scale = users_own if scale is None else scale
    optimizer.found_inf = found_inf
    if torch_optimizer._global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks:
        _C.forget_norms()  # hooks may write gradients without moving version counters
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)


# torch.compiler.disable would import the compiler along with us.
_untraced_step = _disable_dynamo(_step)
