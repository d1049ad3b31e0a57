"""A query for code that may be captured in a CUDA graph."""

import torch


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured on the current stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()
