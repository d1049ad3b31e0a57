"""How a scaler steps an optimizer: scale and flag are tensors, so no step waits for the host."""

import inspect
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from ampfuse._graphs import traced_as
from ampfuse.gradients.signals import Signals


def is_ours(optimizer: Any) -> bool:
    """Return True for ampfuse's optimizers, whose `step` takes signals."""
    return hasattr(type(optimizer), "_own_step")


def is_wrapped_by_accelerate(optimizer: Any) -> bool:
    """Return True while Accelerate wraps `step` to notice whether a scaler calls it."""
    step = vars(optimizer).get("step")
    return getattr(step, "__module__", None) == "accelerate.optimizer"


def has_scheduler(optimizer: Any) -> bool:
    """Return True if `step` is wrapped only by a scheduler of torch's, which counts calls."""
    wrapped = vars(optimizer).get("step")
    is_schedulers = getattr(wrapped, "_wrapped_by_lr_sched", False)
    return is_schedulers and getattr(wrapped, "__wrapped__", None) is type(optimizer).step


def has_own_step(optimizer: Any) -> bool:
    """Return True if a call of `step` calls Adam's own code, after hooks, if there are any."""
    if "step" in vars(optimizer) and not has_scheduler(optimizer):
        return False
    return inspect.unwrap(type(optimizer).step) is type(optimizer)._own_step


def has_hooks_before(optimizer: Any) -> bool:
    """Return True if a hook runs before a step that could change gradients."""
    return bool(optimizer._optimizer_step_pre_hooks) or may_notice(
        torch_optimizer._global_optimizer_pre_hooks
    )


def skips_unseen(optimizer: Any) -> bool:
    """Return True if only Adam's own code can notice that a step is skipped on the device."""
    return not (
        not has_own_step(optimizer)
        or has_hooks_before(optimizer)
        or optimizer._optimizer_step_post_hooks
        or may_notice(torch_optimizer._global_optimizer_post_hooks)
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


def wants_the_scaler(optimizer: Any) -> bool:
    """Return True if `step` takes the scaler itself, which is deprecated in torch."""
    if is_ours(optimizer):
        return False
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


def _traced_step(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    if not is_ours(optimizer):
        return _untraced_step(optimizer, signals, args, kwargs)
    traced = optimizer._traced
    traced.begin()
    if not traced.has_own_step:
        return _untraced_step(optimizer, signals, args, kwargs)
    if args or traced.has_hooks_before:
        signals = without_norms(signals)
    if traced.has_scheduler:  # the compiler does not trace its wrapper of step
        return type(optimizer).step(optimizer, *args, signals=signals, **kwargs)
    return optimizer.step(*args, signals=signals, **kwargs)


@traced_as(_traced_step)
def step_with(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    """Call `optimizer.step(*args, **kwargs)` with the signals.

    Our optimizers take them as an argument, without the norms if hooks or a closure may change the
    gradients before. torch's optimizers, and steps that other code has replaced, take scale and
    flag in torch's way.
    """
    if not is_ours(optimizer) or not has_own_step(optimizer):
        return _step_with_attributes(optimizer, signals, args, kwargs)
    if args or has_hooks_before(optimizer):
        signals = without_norms(signals)
    try:
        return optimizer.step(*args, signals=signals, **kwargs)
    finally:
        _delete_attributes(optimizer)


def without_norms(signals: Signals) -> Signals:
    """Return signals without norms; those of backward have a record of later writes."""
    return Signals(signals.grad_scale, signals.found_inf, None, signals.backward_norms)


def _step_with_attributes(optimizer: Any, signals: Signals, args: Any, kwargs: Any) -> Any:
    """Step with scale and flag as attributes of the optimizer, as torch's scaler does."""
    signals = signals.with_attributes(optimizer)
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
