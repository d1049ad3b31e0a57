"""Detects calls from `torch.distributed.checkpoint.state_dict`.

Distributed checkpoints match entries by their keys, so torch's optimizers find their own options
only in groups that have all of them.
"""

import sys

from ampfuse.optim._callers import callers

MODULE = "torch.distributed.checkpoint.state_dict"


def is_called_by_dcp() -> bool:
    """Return True if `get_state_dict` or a function like it is among the callers."""
    return MODULE in sys.modules and any(
        frame.f_globals.get("__name__") == MODULE for frame in callers()
    )
