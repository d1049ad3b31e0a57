"""Detects a `torch.distributed.optim.ZeroRedundancyOptimizer` that constructs our optimizer."""

import sys
from collections.abc import Sequence

from ampfuse.optim._callers import callers


def is_constructed_by_zero() -> bool:
    """Return True if the optimizer under construction gets only a part of the parameters.

    ZeroRedundancyOptimizer does not declare this, so the callers' frames are searched for one.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    for frame in () if module is None else callers():
        caller = frame.f_locals.get("self")
        if isinstance(caller, module.ZeroRedundancyOptimizer):  # type: ignore[union-attr]
            return bool(caller.world_size > 1)
    return False


def refuse_limits(limits: Sequence[float | None]) -> None:
    """Raise for any finite limit, since the norm would cover only a part of the gradients."""
    if any(limit is not None and limit < float("inf") for limit in limits):
        raise ValueError(
            "max_grad_norm: in a ZeroRedundancyOptimizer each rank has only some of the "
            "parameters, and would clip by the norm of these. Pass "
            "optimizer_class=functools.partial(ampfuse.AdamW, max_grad_norm=..., "
            "process_group=torch.distributed.group.WORLD), and no max_grad_norm beside it"
        )
