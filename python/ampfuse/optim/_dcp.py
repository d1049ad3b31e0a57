"""Detects calls from `torch.distributed.checkpoint.state_dict`.

Distributed checkpoints match entries by their keys, so torch's optimizers find their own options
only in groups that have all of them.
"""

import sys
from types import FrameType

MODULE = "torch.distributed.checkpoint.state_dict"


def is_called_by_dcp() -> bool:
    """Return True if `get_state_dict` or a function like it is among the callers."""
    frame: FrameType | None = sys._getframe(1) if MODULE in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == MODULE:
            return True
        frame = frame.f_back
    return False
