"""Gradient norms for Adam's clipping, over groups, devices and the shards of DTensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._devices import largest, on_device
from ampfuse._dtensors import Sharding, are_processes, local, sharding_of, spread_dimensions
from ampfuse.optim._columns import Columns


@dataclass(frozen=True)
class Clip:
    """How a group's gradients are clipped."""

    total_norm: Tensor  # norm of the gradients, which are still scaled
    max_norm: float
    grad_norm: Tensor | None  # receives the norm of the unscaled gradients

    def on(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the op on a device."""
        grad_norm = self.grad_norm
        return {
            "total_norm": on_device(self.total_norm, device),
            "max_norm": self.max_norm,
            "grad_norm": grad_norm
            if grad_norm is not None and grad_norm.device == device
            else None,
        }


def placed(
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


@dataclass(frozen=True)
class Measured:
    """The result of one read of gradients."""

    total_norm: Tensor
    found_inf: Tensor

    def to(self, device: torch.device) -> "Measured":
        """Return the result on the device."""
        return Measured(self.total_norm.to(device), self.found_inf.to(device))


def group_clips(
    groups: list[dict[str, Any]],
    columns: list[list[Columns]],
    limits: list[float | None],
    shared_limit: float | None,
    grad_norm: Tensor | None,
    *,
    grad_scale: Tensor | None,
    check: bool,
    process_group: Any,
    known_norms: dict[torch.device, Tensor],
) -> tuple[list[Clip | None], Tensor | None]:
    """Return how each group is clipped, and with `check` a flag for non-finite gradients.

    A group with a limit is clipped by its own norm. The other groups share one norm and one limit.
    With `check`, the gradients of all groups are read. A group without gradients calls the same
    collectives as one with gradients, since other ranks may have some.

    `known_norms`: norms of all groups' gradients by device, if a scaler has just computed them.
    """

    def measured_by_all(measured_groups: list[int]) -> Measured:
        are_known = len(measured_groups) == len(groups) and not check
        measured = measure(
            [part for index in measured_groups for part in columns[index]],
            known_norms if are_known else {},
            spread_shardings([groups[index] for index in measured_groups]),
        )
        if process_group is None:
            return measured
        return reduced(measured.to(device_of(groups, process_group)), process_group)

    clips: list[Clip | None] = [None] * len(groups)
    flags = []
    for index, limit in enumerate(limits):
        if limit is not None and (check or limit != math.inf):
            measured = measured_by_all([index])
            clips[index] = Clip(measured.total_norm, limit, None)
            flags.append(measured.found_inf)
    sharing = [index for index, limit in enumerate(limits) if limit is None]
    if shared_limit is not None or (check and sharing):
        measured = measured_by_all(sharing)
        flags.append(measured.found_inf)
        if shared_limit is not None:
            if grad_norm is not None and not any(columns[index] for index in sharing):
                # No step will write it, since these groups have no gradients.
                norm = measured.total_norm
                grad_norm.copy_(norm if grad_scale is None else norm / grad_scale)
            for index in sharing:
                clips[index] = Clip(measured.total_norm, shared_limit, grad_norm)
    return clips, largest(flags) if check else None


def measure(
    columns: Sequence[Columns],
    known_norms: dict[torch.device, Tensor],
    spread: Iterable[tuple[torch.device, Sharding]] = (),
) -> Measured:
    """Measure all gradients as one vector, in float64, on the device of the first one.

    The norm of scaled gradients may exceed float32's range even if no element does. Gradients whose
    norm is known are not read, and their flag is 0, since no caller uses it. `spread`: shardings
    whose collectives this rank calls, even if it has no such gradients.
    """
    lists: dict[tuple[torch.device, Sharding | None], list[Tensor]] = {key: [] for key in spread}
    for part in columns:
        if not part.shardings:
            lists.setdefault((part.device, None), []).extend(part.grads)
            continue
        for grad, sharding in zip(part.grads, part.shardings, strict=True):
            lists.setdefault((part.device, sharding), []).append(grad)
    devices = [device for (device, _), grads in lists.items() if grads]
    parts = []
    for (device, sharding), grads in lists.items():
        known = known_norms.get(device) if grads and devices.count(device) == 1 else None
        parts.append(_measure_list(grads, device, sharding, known))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _nothing(torch.device("cpu"))
    norms = [part.total_norm.to(parts[0].total_norm.device) for part in parts]
    total_norm = ops.multi_tensor_norm(norms).total_norm
    return Measured(total_norm, largest([part.found_inf for part in parts]))


def norm_of_shards(tensors: list[Tensor]) -> Tensor:
    """Return the norm of tensors and DTensors: float64 if any is float64 or complex128."""
    parts = [
        Columns(tensor.device, grads=[local(tensor)], shardings=[sharding_of(tensor)])
        for tensor in tensors
    ]
    return rounded(measure(parts, {}).total_norm, tensors)


def rounded(norm: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return the norm of these tensors as float32, but unchanged if any has 64-bit numbers."""
    is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return norm if is_double else norm.float()


def spread_shardings(groups: list[dict[str, Any]]) -> dict[tuple[torch.device, Sharding], None]:
    """Return the shardings of the DTensors among the parameters, in their order.

    So all ranks call the same collectives, whichever of their parameters have gradients.
    """
    found: dict[tuple[torch.device, Sharding], None] = {}
    if are_processes():
        for param in [param for group in groups for param in group["params"]]:
            sharding = sharding_of(param)
            if sharding is not None:
                found[param.device, sharding] = None
    return found


def _measure_list(
    grads: list[Tensor], device: torch.device, sharding: Sharding | None, known: Tensor | None
) -> Measured:
    """Measure tensors of one sharding, of which `grads` are this rank's shards.

    If the norm of `grads` is known, they are not read, but the collectives are called all the same.
    """
    if known is not None:
        measured = Measured(known, known.new_zeros((), dtype=torch.float32))
    elif grads:
        result = ops.multi_tensor_norm(grads, dtype=torch.float64)
        measured = Measured(result.total_norm, result.found_inf)
    else:
        measured = _nothing(device)
    if sharding is None:
        return measured
    for dimension in spread_dimensions(sharding.placements):
        measured = reduced(measured, sharding.mesh.get_group(dimension))
    return measured


def _nothing(device: torch.device) -> Measured:
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    return Measured(nothing, nothing.clone())


def reduced(measured: Measured, process_group: Any) -> Measured:
    """Combine the results of ranks that have each measured a part."""
    sums = torch.stack([measured.total_norm.double().square(), measured.found_inf.double()])
    torch.distributed.all_reduce(sums, group=process_group)
    norm = sums[0].sqrt().to(measured.total_norm.dtype)
    return Measured(norm, (sums[1] > 0).float())


def found_by_any(found_inf: Tensor, process_group: Any) -> Tensor:
    """Return a flag that is set if any rank has set it."""
    flag = found_inf.clone()
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, process_group)
    return flag


def device_of(groups: list[dict[str, Any]], process_group: Any) -> torch.device:
    """Return the device for collectives: that of the parameters, if this rank has any."""
    for group in groups:
        for param in group["params"]:
            device: torch.device = param.device
            return device
    has_nccl = "nccl" in torch.distributed.get_backend(process_group)
    return torch.device("cuda" if has_nccl and torch.cuda.is_available() else "cpu")
