"""Optimizers that other libraries wrap."""

from typing import Any


def is_wrapped_by_accelerate(optimizer: Any) -> bool:
    """Return True while Accelerate wraps `step` to notice whether a scaler calls it."""
    step = vars(optimizer).get("step")
    return getattr(step, "__module__", None) == "accelerate.optimizer"


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Lightning, Fabric, Accelerate or torch's ZeRO.

    Fabric's wrapper is an instance of a class that it derives from the optimizer's.
    """
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if inner is not None:
            return unwrapped(inner)
    return optimizer
