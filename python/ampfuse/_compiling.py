"""Tools for code that torch.compile may trace."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler


def at_compile_time(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method run while its caller is traced, and leave it out of the graph.

    This is `torch.compiler.assume_constant_result`, except that the method is not traced either
    when its caller runs eagerly after a graph break.
    """
    untraced = _disable_dynamo(method)

    @functools.wraps(method)
    def run(*args: Any) -> None:
        untraced(*args)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


def make_static(values: Iterable[Any], guard: bool = True) -> None:
    """Mark the tensors' addresses as fixed for the compiler, so that CUDA graphs may write them.

    With `guard`, a graph is only used for these tensors.
    """
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.mark_static_address(value, guard=guard)
