"""Steps of optimizers that take scale and flag as tensors, and so skip without a host wait."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ampfuse._graphs import traced_as
from ampfuse.gradients.inspection import Inspection
from ampfuse.optim import Adam, _traced


def _traced_takes_tensors(optimizer: Any) -> bool:
    if not isinstance(optimizer, Adam):
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    optimizer._traced.begin()
    return optimizer._traced.takes_tensors


@traced_as(_traced_takes_tensors)
def takes_tensors(optimizer: Any) -> bool:
    """Return True if the optimizer declares, in torch's way, that it takes scale and flag."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def wants_the_scaler(optimizer: Any) -> bool:
    """Return True if `step` takes the scaler itself, which is deprecated in torch."""
    if isinstance(optimizer, Adam):
        return False
    code = getattr(inspect.unwrap(optimizer.step), "__code__", None)
    if code is None:  # not a Python function
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    # inspect.signature() would take as long as all else that the scaler does in a short step.
    return "grad_scaler" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _traced_may_skip(optimizer: Any, args: Any, kwargs: Any) -> bool:
    if not isinstance(optimizer, Adam) or args or kwargs:
        return False
    optimizer._traced.begin()
    return optimizer._traced.skips_unseen


@traced_as(_traced_may_skip)
def may_skip_on_device(optimizer: Any, args: Any, kwargs: Any) -> bool:
    """Return True if no code can notice whether the host or the device skips the step."""
    return (
        isinstance(optimizer, Adam)
        and not (args or kwargs)
        and optimizer._may_skip_itself()
        and _traced.skips_unseen(optimizer)
    )


def step_with_tensors(
    optimizer: Any,
    scale: Tensor | None,
    found_inf: Tensor,
    inspection: Inspection | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, with scale and flag set while it runs.

    `scale`: the loss scale, if gradients are still multiplied by it, or else None. The user's own
    `grad_scale` is multiplied in. `inspection`: the result of inspecting the gradients.
    """
    users_own = getattr(optimizer, "grad_scale", None)
    if scale is None:
        scale = users_own
    elif users_own is not None:
        scale = scale * users_own
    return _step(optimizer, scale, found_inf, inspection, args, kwargs)


def reusable_norms(steps_alone: bool, inspection: Inspection | None) -> dict[torch.device, Tensor]:
    """Return the norms that an `Adam` need not compute again.

    They are valid only if no other code runs between the inspection and its step.
    """
    if inspection is None or not inspection.is_scaled or not steps_alone:
        return {}
    return inspection.total_norms


def _traced_step(
    optimizer: Any,
    scale: Tensor | None,
    found_inf: Tensor,
    inspection: Inspection | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Step in traced code, where the compiler cannot follow new attributes of an optimizer."""
    if not isinstance(optimizer, Adam):
        return _untraced_step(optimizer, scale, found_inf, args, kwargs)
    traced = optimizer._traced
    traced.begin()
    traced.grad_scale, traced.found_inf = scale, found_inf
    traced.known_norms = reusable_norms(traced.steps_alone and not args, inspection)
    try:
        if traced.has_scheduler:  # the compiler does not trace its wrapper of step
            return type(optimizer).step(optimizer, *args, **kwargs)
        return optimizer.step(*args, **kwargs)
    finally:
        traced.grad_scale = traced.found_inf = None
        traced.known_norms = {}


@traced_as(_traced_step)
def _step(
    optimizer: Any,
    scale: Tensor | None,
    found_inf: Tensor,
    inspection: Inspection | None,
    args: Any,
    kwargs: Any,
) -> Any:
    if not isinstance(optimizer, Adam):
        return _step_with_attributes(optimizer, scale, found_inf, args, kwargs)
    steps_alone = _traced.steps_alone(optimizer) and not args
    optimizer._traced.known_norms = reusable_norms(steps_alone, inspection)
    try:
        return _step_with_attributes(optimizer, scale, found_inf, args, kwargs)
    finally:
        optimizer._traced.known_norms = {}


def _step_with_attributes(
    optimizer: Any, scale: Tensor | None, found_inf: Tensor, args: Any, kwargs: Any
) -> Any:
    """Step with scale and flag as attributes of the optimizer, as in torch."""
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)


# A graph breaks at this call. torch.compiler.disable would import the compiler.
_untraced_step = _disable_dynamo(_step_with_attributes)
