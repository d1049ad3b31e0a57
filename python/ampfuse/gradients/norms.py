"""Norms of gradients on several devices, and of the shards of DTensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.devices import largest
from ampfuse.gradients.lists import GradientList
from ampfuse.gradients.shards import Sharding, is_distributed, local, sharding_of, spread_dimensions


@dataclass(frozen=True)
class Inspected:
    """The result of one read of gradients."""

    total_norm: Tensor
    found_inf: Tensor

    def to(self, device: torch.device) -> "Inspected":
        """Return the result on the device."""
        return Inspected(self.total_norm.to(device), self.found_inf.to(device))


def inspect(
    columns: Sequence[GradientList],
    known_norms: dict[torch.device, Tensor],
    spread: Iterable[tuple[torch.device, Sharding]] = (),
    backward_norms: BackwardNorms | None = None,
) -> Inspected:
    """Inspect all gradients as one vector, in float64, on the device of the first one.

    The norm of scaled gradients may exceed float32's range even if no element does. Gradients whose
    norm is known are not read, and their flag is 0, since no caller uses it. `spread`: shardings
    whose collectives this rank calls, even if it has no such gradients.
    """
    lists: dict[tuple[torch.device, Sharding | None], list[Tensor]] = {key: [] for key in spread}
    for one in columns:
        if not one.shardings:
            lists.setdefault((one.device, None), []).extend(one.grads)
            continue
        for grad, sharding in zip(one.grads, one.shardings, strict=True):
            lists.setdefault((one.device, sharding), []).append(grad)
    devices = [device for (device, _), grads in lists.items() if grads]
    parts = []
    for (device, sharding), grads in lists.items():
        known = known_norms.get(device) if grads and devices.count(device) == 1 else None
        parts.append(_inspect_list(grads, device, sharding, known, backward_norms))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _nothing(torch.device("cpu"))
    norms = [part.total_norm.to(parts[0].total_norm.device) for part in parts]
    total_norm = ops.multi_tensor_norm(norms).total_norm
    return Inspected(total_norm, largest([part.found_inf for part in parts]))


def norm_of_shards(tensors: list[Tensor], owners: list[Tensor]) -> Tensor:
    """Return the norm of tensors and DTensors in float64.

    All ranks pass the same `owners`, but perhaps not the gradients of all of them.
    """
    return inspect(_each(tensors), {}, spread_shardings(owners)).total_norm


def _each(tensors: list[Tensor]) -> list[GradientList]:
    return [
        GradientList(tensor.device, grads=[local(tensor)], shardings=[sharding_of(tensor)])
        for tensor in tensors
    ]


def rounded(norm: Tensor, tensors: list[Tensor]) -> Tensor:
    """Return the norm of these tensors as float32, but unchanged if any has 64-bit numbers."""
    is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return norm if is_double else norm.float()


def spread_shardings(params: list[Tensor]) -> dict[tuple[torch.device, Sharding], None]:
    """Return the shardings of the DTensors among the parameters, in their order.

    So all ranks call the same collectives, whichever of their parameters have gradients.
    """
    found: dict[tuple[torch.device, Sharding], None] = {}
    if is_distributed():
        for param in params:
            sharding = sharding_of(param)
            if sharding is not None:
                found[param.device, sharding] = None
    return found


def _inspect_list(
    grads: list[Tensor],
    device: torch.device,
    sharding: Sharding | None,
    known: Tensor | None,
    backward_norms: BackwardNorms | None,
) -> Inspected:
    """Inspect tensors of one sharding, of which `grads` are this rank's shards.

    If the norm of `grads` is known, they are not read, but the collectives are called all the same.
    """
    if known is not None:
        inspected = Inspected(known, known.new_zeros((), dtype=torch.float32))
    elif grads:
        inspected = inspect_unknown(grads, backward_norms)
    else:
        inspected = _nothing(device)
    if sharding is None:
        return inspected
    for dimension in spread_dimensions(sharding.placements):
        inspected = reduced(inspected, sharding.mesh.get_group(dimension))
    return inspected


def inspect_unknown(grads: list[Tensor], known: BackwardNorms | None) -> Inspected:
    """Inspect gradients on one device; read only those whose norms are not known."""
    found, rest = ([], list(range(len(grads)))) if known is None else known.split(grads)
    results = [record.result for _, record in found]
    if rest:
        results.append(ops.multi_tensor_norm([grads[i] for i in rest], dtype=torch.float64))
    total_norm = total([result.total_norm for result in results])
    return Inspected(total_norm, largest([result.found_inf for result in results]))


def total(norms: list[Tensor]) -> Tensor:
    """Return the norm of lists of gradients from the norm of each."""
    if len(norms) == 1:
        return norms[0]
    return ops.multi_tensor_norm(norms, dtype=torch.float64).total_norm


def _nothing(device: torch.device) -> Inspected:
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    return Inspected(nothing, nothing.clone())


def reduced(inspected: Inspected, process_group: Any) -> Inspected:
    """Combine the results of ranks that have each inspected a part."""
    sums = torch.stack([inspected.total_norm.double().square(), inspected.found_inf.double()])
    torch.distributed.all_reduce(sums, group=process_group)
    norm = sums[0].sqrt().to(inspected.total_norm.dtype)
    return Inspected(norm, (sums[1] > 0).float())


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
