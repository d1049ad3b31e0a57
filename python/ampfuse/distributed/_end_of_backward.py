"""The end of a backward pass, when the norms that were computed in it are ready."""

from collections.abc import Callable
from typing import Any

import torch

from ampfuse.ops import MultiTensorNorm


def at_the_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the present backward pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def keep_for_current_stream(result: MultiTensorNorm) -> None:
    """Keep memory that another stream of a GPU has allocated until the current one has used it."""
    for norm in (result.total_norm, result.norms, result.found_inf):
        if norm.is_cuda:
            norm.record_stream(torch.cuda.current_stream(norm.device))
