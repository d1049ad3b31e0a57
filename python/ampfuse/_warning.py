"""Warnings about a program's own line, however deep in ampfuse and torch they are given."""

import sys
import warnings
from types import FrameType

LIBRARIES = ("ampfuse", "torch")


def warn_caller(text: str) -> None:
    """Warn of the line that called into ampfuse."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
