"""Detects callers in torch that pass no argument by which they could be known."""

import sys
from types import FrameType

# Distributed checkpoints match entries by their keys, so torch's optimizers find their own options
# only in groups that have all of them.
DCP = "torch.distributed.checkpoint.state_dict"
# It constructs an optimizer with a part of the parameters, whose norm is not that of all.
ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def is_called_from(module: str) -> bool:
    """Return True if code of this module is among the callers."""
    frame: FrameType | None = sys._getframe(1) if module in sys.modules else None
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
