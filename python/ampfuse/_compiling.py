"""torch.compile, seen from code that is traced by it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler's would import the compiler along


def at_compile_time(method: Callable[..., None]) -> Callable[..., None]:
    """A method that runs while code that calls it is traced, and is not in the graph.

    That is `torch.compiler.assume_constant_result`, but that it is not traced either when it is
    called by code that runs as it is, because a graph ended there.
    """
    untraced = _disable_dynamo(method)

    @functools.wraps(method)
    def run(*args: Any) -> None:
        untraced(*args)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


def make_static(values: Iterable[Any], guard: bool = True) -> None:
    """Tell the compiler that the tensors stay where they are, so that CUDA graphs may write them.

    With `guard` a graph is for these tensors alone.
    """
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.mark_static_address(value, guard=guard)
