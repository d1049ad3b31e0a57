"""The norms that Adam clips by: over groups, devices, and the shards of DTensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse.optim._columns import Columns, Sharding, on_device, sharding_of
from ampfuse.optim._shards import local


@dataclass(frozen=True)
class Clip:
    """What a group's gradients are clipped by."""

    total_norm: Tensor  # of the gradients as they are, still scaled
    max_norm: float
    grad_norm: Tensor | None  # where the step leaves the norm of the unscaled ones

    def on(self, device: torch.device) -> dict[str, Any]:
        """As arguments of the op."""
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
    """Where steps leave the norm: always the same tensor, unless the parameters move.

    It is measured where the first group is that has no limit of its own.
    """
    sharing = [of for limit, of in zip(limits, of_groups, strict=True) if limit is None and of]
    device = sharing[0][0].device if sharing else None
    if norm is None or (device is not None and norm.device != device):
        return torch.zeros((), dtype=torch.float32, device=device or torch.device("cpu"))
    return norm


@dataclass(frozen=True)
class Measured:
    """What one read of gradients tells."""

    total_norm: Tensor
    found_inf: Tensor

    def to(self, device: torch.device) -> "Measured":
        """The same there."""
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
    """What each group is clipped by: its own norm where it has a limit, else that of the others.

    With `check` also whether any gradient is not finite, for which all are read. Whether there are
    gradients makes no difference to the collectives: other processes may have some.

    `known_norms`, where a scaler has just measured the gradients: those of all groups, by device.
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
                # No step will write it.
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
    """Of all gradients as one vector, on the device of the first; in float64.

    Scaled gradients have norms beyond float32 where none of their elements is. Where the norm of
    all gradients on a device is known, nobody asks whether one of them is not finite. `spread`:
    shardings that other processes have gradients of, whether or not there are some here.
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
    """The norm of whole tensors of which some are DTensors, in the dtype that norms have."""
    parts = [
        Columns(tensor.device, grads=[local(tensor)], shardings=[sharding_of(tensor)])
        for tensor in tensors
    ]
    norm = measure(parts, {}).total_norm
    is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return norm if is_double else norm.float()


def spread_shardings(groups: list[dict[str, Any]]) -> dict[tuple[torch.device, Sharding], None]:
    """How the DTensors among the parameters are spread, in their order.

    Processes then meet in the same collectives, whichever of their parameters have gradients.
    """
    found: dict[tuple[torch.device, Sharding], None] = {}
    if are_processes():
        for param in [param for group in groups for param in group["params"]]:
            sharding = sharding_of(param)
            if sharding is not None:
                found[param.device, sharding] = None
    return found


def are_processes() -> bool:
    """Whether there may be DTensors, which cost a look at each parameter."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def largest(flags: list[Tensor]) -> Tensor:
    """Of 0-dim tensors, which may be on several devices."""
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).amax()


def _measure_list(
    grads: list[Tensor], device: torch.device, sharding: Sharding | None, known: Tensor | None
) -> Measured:
    """Of whole tensors, of which `grads` may be this process's shards.

    Whether the norm of these is known makes no difference to the collectives.
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


def spread_dimensions(placements: Sequence[Any]) -> list[int]:
    """The dimensions of a mesh whose processes have other parts of a DTensor."""
    return [i for i, placement in enumerate(placements) if not placement.is_replicate()]


def reduced(measured: Measured, process_group: Any) -> Measured:
    """Over processes that each have measured a part."""
    sums = torch.stack([measured.total_norm.double().square(), measured.found_inf.double()])
    torch.distributed.all_reduce(sums, group=process_group)
    norm = sums[0].sqrt().to(measured.total_norm.dtype)
    return Measured(norm, (sums[1] > 0).float())


def found_by_any(found_inf: Tensor, process_group: Any) -> Tensor:
    """A flag that any process has set."""
    flag = found_inf.clone()
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, process_group)
    return flag


def device_of(groups: list[dict[str, Any]], process_group: Any) -> torch.device:
    """Where the processes of a group meet: where the parameters are, if there are any here."""
    for group in groups:
        for param in group["params"]:
            device: torch.device = param.device
            return device
    has_nccl = "nccl" in torch.distributed.get_backend(process_group)
    return torch.device("cuda" if has_nccl and torch.cuda.is_available() else "cpu")
