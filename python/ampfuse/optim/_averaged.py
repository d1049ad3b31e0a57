"""Exponential averages of the weights, in place of the weights for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampfuse._nested import params_of
from ampfuse.gradients.shards import local


@contextmanager
def averages_as_params(optimizer: Any) -> Iterator[None]:
    """Copy the averages to the parameters, and the parameters' own values back at the end."""
    refuse_averaged(optimizer, "averaged")
    averages = [
        (local(param.detach()), local(optimizer.state[param]["ema_param"]))
        for param in params_of(optimizer)
        if "ema_param" in optimizer.state.get(param, {})
    ]
    if not averages and all(
        optimizer.options_of(group)["ema"] is None for group in optimizer.param_groups
    ):
        raise RuntimeError("averaged(): there are no averages; pass for example ema=0.999")
    own = [param.clone() for param, _ in averages]
    optimizer._is_averaged = True
    try:
        with torch.no_grad():
            for param, average in averages:
                param.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for (param, _), value in zip(averages, own, strict=True):
                param.copy_(value)
        optimizer._is_averaged = False


def refuse_averaged(optimizer: Any, method: str) -> None:
    """Raise for a call that would take the averages for the parameters."""
    if optimizer._is_averaged:
        raise RuntimeError(
            f"{method}(): the parameters are averages inside of `with optimizer.averaged()`; leave "
            "that block first"
        )
