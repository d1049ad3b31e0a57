"""Warnings that name the program's own line, however deep in ampfuse and torch they are issued."""

import sys
import warnings
from types import FrameType

from torch.cuda.amp.common import amp_definitely_not_available

# The last two have the wrappers of functions that are deprecated.
LIBRARIES = ("ampfuse", "torch", "typing_extensions", "warnings")


def warn_caller(text: str) -> None:
    """Issue a warning that names the program's line, outside of ampfuse and torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def warn_if_no_gpu(text: str) -> bool:
    """Return True if there is no GPU for autocast and scalers, and warn with a text of torch's."""
    is_missing: bool = amp_definitely_not_available()  # type: ignore[no-untyped-call]
    if is_missing:
        warn_caller(text)
    return is_missing
