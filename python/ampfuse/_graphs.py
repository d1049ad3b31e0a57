"""Tools for code that may run in a graph: traced by torch.compile, or captured in a CUDA graph.

Where traced code has to differ from eager code, the eager function names its counterpart with
`traced_as`, or does nothing when traced (`eager_only`).
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler

from ampfuse import _C

P = ParamSpec("P")
R = TypeVar("R")


def traced_as(traced: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make torch.compile trace another function with the same arguments in place of this one."""

    def decorate(eager: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(eager)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            # Without a module of torch in it, the compiler would skip this frame, and perhaps trace
            # the eager function that it calls.
            function = traced if torch.compiler.is_compiling() else eager
            return function(*args, **kwargs)

        return run

    return decorate


def bind_operator(overload: Any) -> Any:
    """Return a function that calls an operator as torch.ops does, but sooner in eager code."""
    return traced_as(overload)(_C.OperatorCall(overload))


def eager_only(function: Callable[P, None]) -> Callable[P, None]:
    """Make a function do nothing in traced code, for example because it counts its calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if not torch.compiler.is_compiling():
            function(*args, **kwargs)

    return run


def at_compile_time(method: Callable[..., R]) -> Callable[..., R]:
    """Make a method run while its caller is traced. The graph has its result as a constant.

    Unlike with `torch.compiler.assume_constant_result`, the method is also not traced when its
    caller runs eagerly after a graph break.
    """
    untraced = _disable_dynamo(method)

    @functools.wraps(method)
    def run(*args: Any) -> R:
        return untraced(*args)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


def make_static(values: Iterable[Any], guard: bool = True) -> None:
    """Mark the tensors' addresses as fixed for the compiler, so that CUDA graphs may write them.

    With `guard`, a graph that was compiled for these tensors is not used for others.
    """
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.mark_static_address(value, guard=guard)


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def uses_gpu() -> bool:
    """Return True if the program has used a GPU."""
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]


def backward_pass() -> int:
    """Return autograd's number of the backward pass that runs on this thread, or -1."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return True if autograd runs a backward pass on this thread."""
    return backward_pass() >= 0


def _stream_captures() -> bool:
    return uses_gpu() and torch.cuda.is_current_stream_capturing()


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured on the current stream."""
    return not torch.compiler.is_compiling() and _stream_captures()


def is_in_graph() -> bool:
    """Return True if the code is being traced or captured, and so may run again without Python."""
    return torch.compiler.is_compiling() or _stream_captures()


def _traced_groups_of(optimizer: Any) -> list[dict[str, Any]]:
    if not hasattr(optimizer, "_traced"):
        return optimizer.param_groups  # type: ignore[no-any-return]
    optimizer._traced.begin()
    return optimizer._traced.param_groups  # type: ignore[no-any-return]


@traced_as(_traced_groups_of)
def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups, for code that may be traced."""
    return optimizer.param_groups  # type: ignore[no-any-return]
