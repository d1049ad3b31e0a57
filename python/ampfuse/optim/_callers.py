"""The frames of the code that is running."""

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """Yield the frames that called the function that iterates, from the innermost one outwards.

    That function's own frame is left out: its `f_locals` would hold the frame itself, a reference
    cycle that keeps the locals of all callers alive until the garbage is collected.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
