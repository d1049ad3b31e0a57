"""Warnings that name the program's own line, however deep in ampfuse and torch they are issued."""

import sys
import warnings
from types import FrameType

LIBRARIES = ("ampfuse", "torch")


def warn_caller(text: str) -> None:
    """Issue a warning that names the program's line, outside of ampfuse and torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
