"""Runs a step as if the program used autocast, to see what that would save."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.tools.hooks import hook_functions, replace
from ampfuse.tools.memory.record import Record
from ampfuse.tools.memory.recorder import Recorder

DTYPE = torch.bfloat16


@contextmanager
def under_autocast(device: str, recorder: Recorder) -> Iterator[None]:
    """Run the code in this block under autocast, whose copies are freed before backward.

    An autocast that the program itself disables, for example by an option, is enabled. One that a
    module disables stays so: this part of the model has to compute in float32.
    """
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def enter_enabled(context: Any) -> Any:
        result = enter(context)
        if not recorder.is_in_module and not context._enabled:
            torch.set_autocast_enabled(context.device, True)  # until the context's __exit__
            torch.set_autocast_dtype(context.device, DTYPE)
        return result

    def clearing(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def cleared(*args: Any, **kwargs: Any) -> Any:
            torch.clear_autocast_cache()  # as where a program leaves autocast
            return backward(*args, **kwargs)

        return cleared

    with ExitStack() as exits:
        hook_functions(exits, backward=clearing)
        replace(exits, torch.autocast, "__enter__", enter_enabled)
        exits.enter_context(torch.autocast(device, dtype=DTYPE))
        yield


def is_in_float32(record: Record) -> bool:
    """Return True if no tensor of a step has 16 bits, so that autocast would change it."""
    return all(one.dtype not in DTYPES_16_BIT for one in record.allocations)
