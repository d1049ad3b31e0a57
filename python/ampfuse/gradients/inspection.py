"""Unscales and inspects an optimizer's gradients on all devices, in one read."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import _C, ops
from ampfuse._graphs import groups_of, traced_as
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.devices import largest, move_to
from ampfuse.gradients.lists import GradientList, resolve_conjugate_grad
from ampfuse.gradients.norms import found_by_any, norm_of_shards, rounded, total
from ampfuse.gradients.shards import is_distributed, is_dtensor, local, spread_dimensions


@dataclass
class Gradients:
    """All gradients of an optimizer."""

    on: dict[torch.device, GradientList] = field(default_factory=dict)
    owners: list[Tensor] = field(default_factory=list)
    """All parameters, also those without a gradient, if there may be other ranks."""
    meshes: dict[tuple[Any, int], None] = field(default_factory=dict)
    """Mesh dimensions along which some parameters are sharded."""
    are_whole: bool = True
    """False if any parameter is sharded, or a gradient here is a DTensor or sparse."""

    def add(self, device: torch.device, params: list[Tensor], grads: list[Tensor]) -> None:
        """Add gradients of one device and their parameters."""
        of_device = self.on.setdefault(device, GradientList(device))
        of_device.params += params
        of_device.grads += grads


@dataclass
class Inspection:
    """The result of inspecting an optimizer's gradients, in tensors on their devices."""

    params: "list[int] | list[weakref.ref[Tensor]]"  # identities(), so that a model can be deleted
    norms: list[Tensor]  # norms of the gradients, in the order of `params`
    total_norms: dict[torch.device, Tensor]  # norm of this rank's gradients on each device
    are_whole: bool  # True if the total norms cover every element of every gradient
    is_scaled: bool = False  # True if the gradients were still scaled
    backward_norms: BackwardNorms | None = None  # those of which some are in `norms`
    norm_of_shards: Tensor | None = None  # norm over all ranks, set by `add_norm_of_shards`
    unscaled_norm: Tensor | None = None  # set by `norm_or_refuse`


def gradients_of(optimizer: Optimizer, allow_fp16: bool) -> Gradients:
    """Return the gradients of all parameter groups."""
    found = Gradients()
    for group_index, group in enumerate(groups_of(optimizer)):
        params = list(group["params"])
        ordinary, others = ordinary_grads(params, allow_fp16)
        for device, with_grads, grads in ordinary:
            found.add(device, with_grads, grads)
        if is_distributed():  # all ranks call the collectives, even without gradients
            found.owners += params
            for param in filter(is_dtensor, params):
                spread = spread_dimensions(param.placements)
                found.meshes |= {(param.device_mesh, dimension): None for dimension in spread}
        for index in others:
            param = params[index]
            if param.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. Parameter "
                    f"{index} of group {group_index}, whose gradient is float16, is {param.dtype} "
                    f"of shape {tuple(param.shape)}: keep parameters in float32 under autocast, or "
                    "make the scaler with allow_fp16_grads=True for an optimizer that has masters"
                )
            grad = dense_part(param)
            found.add(grad.device, [param], [grad])
            found.are_whole &= grad is param.grad
    found.are_whole &= not found.meshes
    return found


def _traced_ordinary_grads(params: list[Tensor], allow_fp16: bool) -> Any:
    return [], [index for index, param in enumerate(params) if param.grad is not None]


@traced_as(_traced_ordinary_grads)
def ordinary_grads(params: list[Tensor], allow_fp16: bool) -> Any:
    """Return (device, parameters, gradients) for plain gradients, and the indices of others."""
    return _C.ordinary_grads(params, allow_fp16)


def dense_part(param: Tensor) -> Tensor:
    """Return this rank's elements of a gradient as a dense tensor."""
    resolve_conjugate_grad(param)
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        # The sum of duplicate entries may overflow, most likely in float16: add them up now.
        if grad.dtype == torch.float16:
            param.grad = grad = grad.coalesce()
        return grad._values()
    return local(grad)


def inspect(
    gradients: Gradients,
    inv_scale: Tensor,
    found_inf: Tensor,
    process_group: Any,
    known: BackwardNorms | None = None,
) -> tuple[dict[torch.device, Tensor], Inspection]:
    """Multiply gradients by `inv_scale`; return flags for non-finite products, and the norms.

    There is one flag per device, or, if other ranks take part, one for all devices and ranks.
    `found_inf` itself is the flag of its own device. With `inv_scale` equal to 1 no gradient is
    written, and those whose norms are `known` from backward are not read.
    """
    flags: dict[torch.device, Tensor] = {}
    params: list[Tensor] = []
    norms, total_norms = [], {}
    are_whole = gradients.are_whole and process_group is None
    for device, unread in gradients.on.items():
        flags[device] = move_to(found_inf, device)
        totals = []
        if known is not None:
            records, rest = known.split(unread.grads)
            for indices, record in records:
                torch.maximum(flags[device], record.result.found_inf, out=flags[device])
                params += [unread.params[index] for index in indices]
                norms.append(record.result.norms)
                totals.append(record.result.total_norm)
            unread = GradientList(
                device, [unread.params[i] for i in rest], [unread.grads[i] for i in rest]
            )
        results = unscale(unread, flags[device], move_to(inv_scale, device))
        for once, result in results:
            params += once.params
            norms.append(result.norms)
            totals.append(result.total_norm)
        if len(results) > 1:  # a gradient was multiplied twice
            are_whole = False
        else:
            total_norms[device] = total(totals)
    if gradients.meshes or process_group is not None:
        flag = flag_of_all_ranks(found_inf, flags, gradients.meshes, process_group)
        flags = {found_inf.device: flag}
    found = Inspection(identities(params), norms, total_norms, are_whole, backward_norms=known)
    return flags, found


def unscale(
    gradients: GradientList, found_inf: Tensor, inv_scale: Tensor
) -> list[tuple[GradientList, ops.UnscaledNorm]]:
    """Multiply gradients in place, set the flag if any is non-finite, and return their norms.

    A gradient that is listed twice is multiplied twice, as in torch. Then there are several
    results, for lists without repeats.
    """
    if not gradients.grads:
        return []
    try:
        return [(gradients, _unscale_once(gradients, found_inf, inv_scale))]
    except ValueError:
        lists = split_repeats(gradients)
        if len(lists) == 1:
            raise
        for once in lists:  # writes nothing; raises for gradients that overlap partly
            _unscale_once(once, found_inf.clone(), torch.ones_like(inv_scale))
        return [(once, _unscale_once(once, found_inf, inv_scale)) for once in lists]


def _unscale_once(
    gradients: GradientList, found_inf: Tensor, inv_scale: Tensor
) -> ops.UnscaledNorm:
    return ops.multi_tensor_unscale_norm(gradients.grads, found_inf, inv_scale, dtype=torch.float64)


def split_repeats(gradients: GradientList) -> list[GradientList]:
    """Split the gradients into lists in which no two begin at the same address."""
    found: list[GradientList] = []
    seen: Counter[int] = Counter()
    for param, grad in zip(gradients.params, gradients.grads, strict=True):
        address = grad.data_ptr()
        if seen[address] == len(found):
            found.append(GradientList(gradients.device))
        found[seen[address]].params.append(param)
        found[seen[address]].grads.append(grad)
        seen[address] += 1
    return found


def _traced_identities(tensors: list[Tensor]) -> list[int] | list[weakref.ref[Tensor]]:
    # With id(), torch.compile would compile again for other parameters.
    return [weakref.ref(tensor) for tensor in tensors]


@traced_as(_traced_identities)
def identities(tensors: list[Tensor]) -> list[int] | list[weakref.ref[Tensor]]:
    """Return what identifies the tensors without keeping them alive.

    torch refuses to move or cast a model of DTensors to whose parameters there are weak references.
    """
    return list(map(id, tensors))


def unscaled_norm(inspections: Iterable[Inspection], scale: Tensor) -> Tensor | None:
    """Return the norm of all optimizers' unscaled gradients, or None if it is not known."""
    norms = []
    for inspection in inspections:
        if inspection.unscaled_norm is not None:
            return inspection.unscaled_norm  # set only with skip_outliers: there is one optimizer
        total_norms = list(inspection.total_norms.values())
        if inspection.norm_of_shards is not None:
            total_norms = [inspection.norm_of_shards]
        elif not inspection.are_whole:
            return None
        for norm in total_norms:
            norm = move_to(norm, scale.device)
            norms.append(norm / scale if inspection.is_scaled else norm)
    return ops.multi_tensor_norm(norms, dtype=torch.float32).total_norm if norms else None


def add_norm_of_shards(gradients: Gradients, inspection: Inspection) -> None:
    """Compute the norm of gradients of which some are shards, in one more read, on all ranks."""
    if any(map(is_dtensor, gradients.owners)):
        grads = [param.grad for param in gradients.owners if param.grad is not None]
        inspection.norm_of_shards = norm_of_shards(grads, gradients.owners)


def norm_or_refuse(inspection: Inspection, scale: Tensor) -> Tensor | None:
    """Return the norm of an optimizer's unscaled gradients, or None if it has none."""
    norm = unscaled_norm([inspection], scale)
    if norm is None and inspection.norms:
        raise ValueError(
            "skip_outliers: the norm of the gradients is not known, since some of them are sparse "
            "or occur twice"
        )
    inspection.unscaled_norm = norm
    return norm


def norm_for(params: list[Tensor], inspection: Inspection) -> Tensor | None:
    """Return the norm that `clip_grad_norm_` would compute, or None if it is not known."""
    norms = list(inspection.total_norms.values())
    if not inspection.are_whole or not norms:
        return None
    grads = [param.grad for param in params if param.grad is not None]
    return rounded(total([move_to(norm, norms[0].device) for norm in norms]), grads)


def flag_of_all_ranks(
    found_inf: Tensor,
    flags: dict[torch.device, Tensor],
    meshes: dict[tuple[Any, int], None],
    process_group: Any,
) -> Tensor:
    """Return one flag for all ranks, even those without gradients: either all skip, or none."""
    flag = largest([found_inf, *flags.values()])
    groups = [mesh.get_group(dimension) for mesh, dimension in meshes]
    for group in [*groups, *([] if process_group is None else [process_group])]:
        flag = found_by_any(flag, group)
    return flag
