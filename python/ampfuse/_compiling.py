"""torch.compile, seen from code that is traced by it."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def at_compile_time(method: T) -> T:
    """A method that runs while code that calls it is traced, and is not in the graph.

    That is `torch.compiler.assume_constant_result`, which would import the compiler along with us.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def make_static(values: Iterable[Any], guard: bool = True) -> None:
    """Tell the compiler that the tensors stay where they are, so that CUDA graphs may write them.

    With `guard` a graph is for these tensors alone.
    """
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.mark_static_address(value, guard=guard)
