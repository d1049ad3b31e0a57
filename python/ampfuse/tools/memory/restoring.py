"""Restores what steps have changed of models and optimizers, without a copy of all weights."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse._nested import params_of, states_of
from ampfuse._random import random_states, set_random_states


@contextmanager
def unchanged(model: nn.Module, optimizer: Optimizer) -> Iterator[ExitStack]:
    """Restore model, gradients, optimizer state and random numbers after this block.

    On a CPU this is for dry runs, which write to no other tensors than integers and those with one
    element. What is on a GPU is kept on the host meanwhile. The stack takes what else to restore.
    """
    params = {*model.parameters(), *params_of(optimizer)}
    with ExitStack() as exits:
        restore_numbers(exits, [*params, *(param.grad for param in params), *model.buffers()])
        for module in model.modules():  # a module may make a table, for example
            for entries in (module._buffers, module._parameters, vars(module)):
                restore_entries(exits, entries)
        for param in params:
            restore_parameter(exits, param)
        restore_optimizer(exits, optimizer)
        exits.callback(set_random_states, random_states())
        yield exits


def restore_numbers(exits: ExitStack, values: Iterable[Any]) -> None:
    """Restore the numbers of the tensors among these values that a dry run may write."""
    written = [
        one
        for one in values
        if isinstance(one, Tensor)
        and (one.device.type != "cpu" or one.numel() <= 1 or not one.is_floating_point())
        and 0 not in one.stride()  # an expanded tensor cannot be written
    ]
    numbers = [one.detach().to("cpu", copy=True) for one in written]

    def restore() -> None:
        with torch.no_grad():
            for tensor, number in zip(written, numbers, strict=True):
                tensor.copy_(number)

    exits.callback(restore)


def restore_entries(exits: ExitStack, entries: dict[Any, Any]) -> None:
    """Restore which objects a dict has."""
    before = dict(entries)
    exits.callback(entries.update, before)
    exits.callback(entries.clear)


def restore_parameter(exits: ExitStack, param: Tensor) -> None:
    """Restore a parameter's data, its gradient, and whether it has one."""
    data, gradient, is_trained = param.data, param.grad, param.requires_grad

    def restore() -> None:
        if param.data_ptr() != data.data_ptr():
            param.data = data
        if param.requires_grad != is_trained:
            param.requires_grad_(is_trained)
        param.grad = gradient

    exits.callback(restore)


def restore_optimizer(exits: ExitStack, optimizer: Optimizer) -> None:
    """Restore the state and the options of an optimizer."""
    dicts: list[dict[Any, Any]] = [*states_of(optimizer), *optimizer.param_groups]
    restore_numbers(exits, [value for entries in dicts for value in entries.values()])
    restore_entries(exits, optimizer.state)
    for entries in dicts:
        restore_entries(exits, entries)
    exits.callback(optimizer.param_groups.__setitem__, slice(None), list(optimizer.param_groups))
