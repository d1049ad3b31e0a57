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
    """`optimizer.step(*args, **kwargs)`, which finds scale and flag for its duration.

    `scale`: by which gradients are scaled still, besides the user's own `grad_scale`, if there is
    one.
    """
    users_own = getattr(optimizer, "grad_scale", None)
    if scale is None:
        scale = users_own
    elif users_own is not None:
        scale = scale * users_own
    if not torch.compiler.is_compiling():
        return _step(optimizer, scale, found_inf, args, kwargs)
    if isinstance(optimizer, Adam):
        return _traced_step(optimizer, scale, found_inf, args, kwargs)
    return _untraced_step(optimizer, scale, found_inf, args, kwargs)


def has_pre_hooks(optimizer: Any) -> bool:
    """They may write gradients, and that without moving version counters."""
    return (
        len(torch_optimizer._global_optimizer_pre_hooks) + len(optimizer._optimizer_step_pre_hooks)
        > 0
    )


def _step(optimizer: Any, scale: Tensor | None, found_inf: Tensor, args: Any, kwargs: Any) -> Any:
    """As torch has it: they are attributes."""
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    if has_pre_hooks(optimizer):
        _C.forget_norms()
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)


def _traced_step(
    optimizer: Adam, scale: Tensor | None, found_inf: Tensor, args: Any, kwargs: Any
) -> Any:
    """The compiler cannot follow what becomes an attribute of an optimizer."""
    traced = optimizer._traced
    traced.grad_scale, traced.found_inf = scale, found_inf
    if has_pre_hooks(optimizer):
        traced.known_norms = []
    traced.begin()
    try:
        if traced.has_scheduler:  # whose wrapper the compiler does not trace
            return type(optimizer).step(optimizer, *args, **kwargs)
        return optimizer.step(*args, **kwargs)
    finally:
        traced.grad_scale = traced.found_inf = None
        traced.known_norms = []


# The graph ends there. torch.compiler.disable would import the compiler along with us.
_untraced_step = _disable_dynamo(_step)
