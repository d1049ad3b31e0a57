"""How a scaler steps an optimizer: scale and flag are tensors, so no step waits for the host."""

import inspect
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer

from ampfuse._graphs import is_capturing, traced_as
from ampfuse.gradients.signals import Signals


def is_ours(optimizer: Any) -> bool:
    """Return True for ampfuse's optimizers, which take signals from their slot."""
    return hasattr(type(optimizer), "_own_step")


def has_scheduler(optimizer: Any) -> bool:
    """Return True if `step` is wrapped only by a scheduler of torch's, which counts calls."""
    wrapped = vars(optimizer).get("step")
    is_schedulers = getattr(wrapped, "_wrapped_by_lr_sched", False)
    return is_schedulers and getattr(wrapped, "__wrapped__", None) is type(optimizer).step


def is_wrapped_by_accelerate(optimizer: Any) -> bool:
    """Return True while Accelerate wraps `step` to notice whether a scaler calls it."""
    step = vars(optimizer).get("step")
    return getattr(step, "__module__", None) == "accelerate.optimizer"


def steps_alone(optimizer: Any) -> bool:
    """Return True if no other code runs between a call of `step` and ampfuse's own code."""
    return (
        ("step" not in vars(optimizer) or has_scheduler(optimizer))
        and inspect.unwrap(type(optimizer).step) is type(optimizer)._own_step
        and not optimizer._optimizer_step_pre_hooks
        and not may_notice(torch_optimizer._global_optimizer_pre_hooks)
    )


def skips_unseen(optimizer: Any) -> bool:
    """Return True if only ampfuse's own code can notice that a step is skipped on the device."""
    return (
        steps_alone(optimizer)
        and not optimizer._optimizer_step_post_hooks
        and not may_notice(torch_optimizer._global_optimizer_post_hooks)
    )


def may_notice(hooks: dict[int, Any]) -> bool:
    """Return True if any of the hooks could notice a skipped step: all that do not only measure."""
    if not hooks:
        return False
    return any(not getattr(hook, "only_measures", False) for hook in hooks.values())


def _traced_takes_tensors(optimizer: Any) -> bool:
    if not is_ours(optimizer):
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    optimizer._traced.begin()
    return bool(optimizer._traced.takes_tensors)


@traced_as(_traced_takes_tensors)
def takes_tensors(optimizer: Any) -> bool:
    """Return True if the optimizer declares, in torch's way, that it takes scale and flag."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any) -> bool:
    """Return True if `step` takes the scaler itself, which is deprecated in torch."""
    if is_ours(optimizer) or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return _has_scaler_argument(optimizer)


@_disable_dynamo  # a traced unwrap() would guard the id of a bound method, which is a new object
def _has_scaler_argument(optimizer: Any) -> bool:
    code = getattr(inspect.unwrap(optimizer.step), "__code__", None)
    if code is None:  # not a Python function
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    # inspect.signature() would take as long as all else that the scaler does in a short step.
    return "grad_scaler" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _traced_may_skip(optimizer: Any, args: Any, kwargs: Any) -> bool:
    if not is_ours(optimizer) or args or kwargs:
        return False
    optimizer._traced.begin()
    return bool(optimizer._traced.skips_unseen)


@traced_as(_traced_may_skip)
def may_skip_on_device(optimizer: Any, args: Any, kwargs: Any) -> bool:
    """Return True if no code can notice whether the host or the device skips the step."""
    return (
        is_ours(optimizer)
        and not (args or kwargs)
        and optimizer._may_skip_itself()
        and skips_unseen(optimizer)
    )


def _go_around_scheduler(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if optimizer._traced.has_scheduler:  # the compiler does not trace its wrapper of step
        return type(optimizer).step(optimizer, *args, **kwargs)
    return optimizer.step(*args, **kwargs)


def _traced_plain_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if not is_ours(optimizer):
        return optimizer.step(*args, **kwargs)
    optimizer._traced.begin()
    return _go_around_scheduler(optimizer, args, kwargs)


@traced_as(_traced_plain_step)
def step_plainly(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, so that torch.compile can trace it."""
    return optimizer.step(*args, **kwargs)


def _traced_step(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    if not is_ours(optimizer):
        return _untraced_step(optimizer, signals, args, kwargs)
    traced, slot = optimizer._traced, optimizer._slot
    traced.begin()
    slot.signals = signals if traced.steps_alone and not args else drop_norms(signals)
    try:
        return _go_around_scheduler(optimizer, args, kwargs)
    finally:
        slot.signals = None


@traced_as(_traced_step)
def step_with(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    """Call `optimizer.step(*args, **kwargs)` with the signals.

    If other code runs before or around the step of our optimizers, they get scale and flag as
    torch's do, in attributes, which that code may read and change. Norms are computed again then.
    """
    if not is_ours(optimizer) or args or not steps_alone(optimizer):
        return _step_with_attributes(optimizer, signals, args, kwargs)
    optimizer._slot.signals = signals
    try:
        return optimizer.step(**kwargs)
    finally:
        optimizer._slot.signals = None
        _delete_attributes(optimizer)


def drop_norms(signals: Signals) -> Signals:
    """Return signals without norms; those of backward have a record of later writes."""
    return Signals(signals.grad_scale, signals.found_inf, None, signals.backward_norms)


def makes_momentum(optimizer: Any) -> bool:
    """Return True if this step of torch's fused SGD makes momentum buffers."""
    return isinstance(optimizer, SGD) and any(
        group.get("fused")  # ampfuse's SGD has no such option
        and group["momentum"] != 0
        and any(
            param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            for param in group["params"]
        )
        for group in optimizer.param_groups
    )


def _step_with_attributes(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    """Step with scale and flag as attributes of the optimizer, as torch's scaler does."""
    signals = signals.add_attributes(optimizer)
    # torch makes the buffers uninitialised, and a step that the flag skips on the device leaves
    # them so: all later steps would train on this memory. So the host skips the first step.
    flag = None if is_capturing() else signals.found_inf
    if flag is not None and makes_momentum(optimizer) and flag.item():
        return None
    optimizer.grad_scale, optimizer.found_inf = signals.grad_scale, signals.found_inf
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        _delete_attributes(optimizer)


def _delete_attributes(optimizer: Any) -> None:
    """Delete the attributes, also those that the program has set, as torch's scaler does."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


# A graph breaks at this call. torch.compiler.disable would import the compiler.
_untraced_step = _disable_dynamo(_step_with_attributes)
