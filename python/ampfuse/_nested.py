"""Finds tensors in nested values, and the parameters of optimizers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

PLAIN = Tensor.__torch_dispatch__  # of subclasses, too, that do not define their own


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def stored_tensors_in(values: Any) -> Iterator[Tensor]:
    """Return the tensors that have a storage: not sparse ones, and not wrappers of torch.func."""
    for tensor in tensors_in(values):
        if tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            yield tensor


def have_own_operators(tensors: Iterable[Tensor]) -> bool:
    """Return True if a tensor has operators of its own, for example a DTensor.

    Such operators call others on the tensors inside, and a dispatch mode sees those calls later.
    """
    return any(type(tensor).__torch_dispatch__ is not PLAIN for tensor in tensors)


def states_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the states of an optimizer's parameters. It may keep other values beside them."""
    return [state for state in optimizer.state.values() if isinstance(state, dict)]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Lightning, Fabric, Accelerate or torch's ZeRO.

    Fabric's wrapper is an instance of a class that it derives from the optimizer's.
    """
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if inner is not None:
            return unwrapped(inner)
    return optimizer
