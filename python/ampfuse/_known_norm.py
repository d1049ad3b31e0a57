"""Norms that one pass over gradients has told already, for whoever asks for them next."""

from collections import deque

from torch import Tensor

from ampfuse import _C
from ampfuse._capture import is_capturing

# What was stamped, its norm, and whether a CUDA graph was being captured.
_known: deque[tuple[_C.TensorStamp, Tensor, bool]] = deque(
    maxlen=8
)  # one for each of some optimizers


def remember(tensors: list[Tensor], norm: Tensor) -> None:
    """That this is the 2-norm of the tensors as they are now."""
    try:
        _known.appendleft((_C.TensorStamp(tensors), norm, is_capturing()))
    except RuntimeError:  # tensors of inference mode do not count how often they are written
        return


def recall(tensors: list[Tensor]) -> Tensor | None:
    """Their norm, if it is known and none has been written since.

    A graph that is being captured does not take it from before: at replays it would be old.
    """
    if not _known:
        return None
    capturing = is_capturing()
    try:
        for stamp, norm, was_capturing in _known:
            if was_capturing == capturing and stamp.matches(tensors):
                return norm
    except RuntimeError:
        pass
    return None
