"""Runs a step as if the program used autocast, to see what that would save."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.tools.hooks import hook_functions
from ampfuse.tools.memory.record import Record


@contextmanager
def under_autocast(device: str) -> Iterator[None]:
    """Run the code in this block under autocast, whose copies are freed before backward."""

    def clearing(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def cleared(*args: Any, **kwargs: Any) -> Any:
            torch.clear_autocast_cache()  # as where a program leaves autocast
            return backward(*args, **kwargs)

        return cleared

    with ExitStack() as exits:
        hook_functions(exits, backward=clearing)
        exits.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        yield


def is_in_float32(record: Record) -> bool:
    """Return True if no tensor of a step has 16 bits, so that autocast would change it."""
    return all(one.dtype not in DTYPES_16_BIT for one in record.allocations)
