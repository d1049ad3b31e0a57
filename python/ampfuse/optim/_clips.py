"""How a step clips the gradients of each group, and the tensor that receives their norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfuse.gradients import norms
from ampfuse.gradients.devices import largest, move_to
from ampfuse.gradients.shards import is_distributed
from ampfuse.gradients.signals import Signals
from ampfuse.optim._columns import Columns


@dataclass(frozen=True)
class Clip:
    """How a group's gradients are clipped."""

    total_norm: Tensor  # norm of the gradients, which are still scaled
    max_norm: float
    grad_norm: Tensor | None  # receives the norm of the unscaled gradients

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the op on a device."""
        grad_norm = self.grad_norm
        return {
            "total_norm": move_to(self.total_norm, device),
            "max_norm": self.max_norm,
            "grad_norm": grad_norm
            if grad_norm is not None and grad_norm.device == device
            else None,
        }


def grad_norm_tensor(
    norm: Tensor | None, limits: list[float | None], of_groups: Sequence[Sequence[Any]]
) -> Tensor:
    """Return the tensor that receives the norm: always the same, unless the parameters move.

    It is on the device of the first group that has gradients and no limit of its own.
    """
    sharing = [of for limit, of in zip(limits, of_groups, strict=True) if limit is None and of]
    device = sharing[0][0].device if sharing else None
    if norm is None or (device is not None and norm.device != device):
        return torch.zeros((), dtype=torch.float32, device=device or torch.device("cpu"))
    return norm


def group_clips(
    optimizer: Any,
    groups: list[dict[str, Any]],
    columns: list[list[Columns]],
    limits: list[float | None],
    signals: Signals,
) -> tuple[list[Clip | None], Tensor | None]:
    """Return how each group is clipped, and the flag by which the step is skipped, or None.

    A group with a limit is clipped by its own norm. The other groups share one norm and one limit.
    If gradients are scaled and nobody has looked for overflow, those of all groups are read. A
    group without gradients calls the same collectives as one with gradients, since other ranks may
    have some.
    """
    shared_limit, grad_norm = optimizer.max_grad_norm, optimizer._grad_norm
    process_group, grad_scale = optimizer.process_group, signals.grad_scale
    check = grad_scale is not None and signals.found_inf is None
    has_own_limits = any(limit is not None for limit in limits)
    if not (check or has_own_limits or is_distributed()):  # the usual case
        if shared_limit is None:
            return [None] * len(groups), signals.found_inf
        if signals.norms is not None and len(signals.norms) == 1:
            (total_norm,) = signals.norms.values()
            return [Clip(total_norm, shared_limit, grad_norm)] * len(groups), signals.found_inf

    def inspected_by_all(inspected_groups: list[int]) -> norms.Inspected:
        are_known = len(inspected_groups) == len(groups) and not check
        params = [param for index in inspected_groups for param in groups[index]["params"]]
        inspected = norms.inspect(
            [one for index in inspected_groups for one in columns[index]],
            (signals.norms or {}) if are_known else {},
            norms.spread_shardings(params),
            signals.backward_norms,
        )
        if process_group is None:
            return inspected
        return norms.reduced(inspected.to(norms.device_of(groups, process_group)), process_group)

    clips: list[Clip | None] = [None] * len(groups)
    flags = []
    for index, limit in enumerate(limits):
        if limit is not None and (check or limit != math.inf):
            inspected = inspected_by_all([index])
            clips[index] = Clip(inspected.total_norm, limit, None)
            flags.append(inspected.found_inf)
    sharing = [index for index, limit in enumerate(limits) if limit is None]
    if shared_limit is not None or (check and sharing):
        inspected = inspected_by_all(sharing)
        flags.append(inspected.found_inf)
        if shared_limit is not None:
            if grad_norm is not None and not any(columns[index] for index in sharing):
                # No call of the op writes `grad_norm`, since these groups have no gradients.
                norm = inspected.total_norm
                grad_norm.copy_(norm if grad_scale is None else norm / grad_scale)
            for index in sharing:
                clips[index] = Clip(inspected.total_norm, shared_limit, grad_norm)
    if check:
        return clips, largest(flags)
    if signals.found_inf is not None and process_group is not None:
        return clips, norms.found_by_any(signals.found_inf, process_group)
    return clips, signals.found_inf
