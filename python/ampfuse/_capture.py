"""CUDA graphs, seen from code that may be captured in one."""

import torch


def is_capturing() -> bool:
    """Whether a graph is being captured on this stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()
