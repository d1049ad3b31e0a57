"""Exponential averages of the weights, in place of the weights for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampfuse._nested import params_of
from ampfuse.gradients.shards import is_dtensor, local


@contextmanager
def averages_as_params(optimizer: Any, model: torch.nn.Module | None) -> Iterator[None]:
    """Copy the averages to the parameters, and the parameters' own values back at the end."""
    refuse_averaged(optimizer, "averaged")
    params = [
        param for param in params_of(optimizer) if "ema_param" in optimizer.state.get(param, {})
    ]
    check_averages(optimizer, params, model)
    own = [local(param.detach()).clone() for param in params]
    optimizer._traced.is_averaged = True
    try:
        put([local(optimizer.state[param]["ema_param"]) for param in params], params, model)
        yield
    finally:
        put(own, params, model)
        optimizer._traced.is_averaged = False


def check_averages(
    optimizer: Any, params: list[torch.Tensor], model: torch.nn.Module | None
) -> None:
    """Raise if there are no averages, or if they are not in all places where weights are used."""
    groups = optimizer.param_groups
    if not params and all(optimizer.options_of(group)["ema"] is None for group in groups):
        raise RuntimeError("averaged(): there are no averages; pass for example ema=0.999")
    if optimizer._is_in_zero:
        raise RuntimeError(
            "averaged(): in a ZeroRedundancyOptimizer each rank has averages of some parameters "
            "only"
        )
    if model is None and any(map(is_dtensor, params)):
        raise RuntimeError(
            "averaged(): parameters are DTensors, and fully_shard may hold gathered copies of "
            "them: write averaged(model), so that it gathers the averages"
        )


@torch.no_grad()
def put(
    values: list[torch.Tensor], params: list[torch.Tensor], model: torch.nn.Module | None
) -> None:
    """Copy values to parameters, and free the copies of their shards that the model has gathered.

    A parameter may have got other memory, for example by a cast.
    """
    for param, value in zip(params, values, strict=True):
        local(param.detach()).copy_(value)
    torch.clear_autocast_cache()  # it has copies of float32 weights, in an autocast block
    for module in () if model is None else model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard):  # a module of fully_shard
            reshard()


def refuse_averaged(optimizer: Any, method: str) -> None:
    """Raise for a call that would take the averages for the parameters."""
    if optimizer._traced.is_averaged:
        raise RuntimeError(
            f"{method}(): the parameters are averages inside of `with optimizer.averaged()`; leave "
            "that block first"
        )
