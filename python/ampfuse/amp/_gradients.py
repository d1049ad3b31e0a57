"""One read of an optimizer's gradients, wherever they are: unscaled, looked through, measured."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import _C, ops
from ampfuse.optim._columns import on_device
from ampfuse.optim._grad_norm import are_processes, largest, spread_dimensions
from ampfuse.optim._shards import is_sharded, local
from ampfuse.optim._traced import groups_of


@dataclass
class DeviceGradients:
    """Those on one device, as the kernels take them."""

    params: list[Tensor]
    grads: list[Tensor]

    def rounds(self) -> list["DeviceGradients"]:
        """Such that no two of one begin at the same place in memory."""
        found: list[DeviceGradients] = []
        seen: Counter[int] = Counter()
        for param, grad in zip(self.params, self.grads, strict=True):
            place = grad.data_ptr()
            if seen[place] == len(found):
                found.append(DeviceGradients([], []))
            found[seen[place]].params.append(param)
            found[seen[place]].grads.append(grad)
            seen[place] += 1
        return found


@dataclass
class Gradients:
    """All of an optimizer's."""

    on: dict[torch.device, DeviceGradients] = field(default_factory=dict)
    meshes: dict[tuple[Any, int], None] = field(default_factory=dict)
    """Mesh dimensions over which some parameters are spread."""
    are_whole: bool = True
    """Whether the kernels get all elements of all, and nothing else."""

    def add(self, device: torch.device, params: list[Tensor], grads: list[Tensor]) -> None:
        """Some more."""
        part = self.on.setdefault(device, DeviceGradients([], []))
        part.params += params
        part.grads += grads


@dataclass
class Inspection:
    """What one look at an optimizer's gradients told; all on the devices of the gradients."""

    params: "_C.WeakTensors | TracedWeakTensors"  # which a model may take with it
    norms: list[Tensor]  # of the parameters' gradients, in the same order
    total_norms: dict[torch.device, Tensor]  # of what this process has on each device
    are_whole: bool  # whether that is all of all gradients
    is_scaled: bool = False  # whether the norms are of gradients that are scaled still


def gather(optimizer: Optimizer, allow_fp16: bool) -> Gradients:
    """The gradients of all groups."""
    found = Gradients()
    for group_index, group in enumerate(groups_of(optimizer)):
        params = list(group["params"])
        ordinary, others = ordinary_grads(params, allow_fp16)
        for of_device in ordinary:
            found.add(*of_device)
        if are_processes():  # which meet whether or not each has a gradient of these
            for param in filter(is_sharded, params):
                spread = spread_dimensions(param.placements)
                found.meshes |= {(param.device_mesh, dimension): None for dimension in spread}
        for index in others:
            param = params[index]
            if param.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. Parameter "
                    f"{index} of group {group_index} is {param.dtype} of shape "
                    f"{tuple(param.shape)}: keep parameters in float32 under autocast, or make "
                    "the scaler with allow_fp16_grads=True for an optimizer that has masters"
                )
            grad = dense_part(param)
            found.add(grad.device, [param], [grad])
            found.are_whole &= grad is param.grad
    return found


def ordinary_grads(params: list[Tensor], allow_fp16: bool) -> Any:
    """Per device, parameters and their gradients of which all is well; and places of others."""
    if torch.compiler.is_compiling():
        return [], [place for place, param in enumerate(params) if param.grad is not None]
    return _C.ordinary_grads(params, allow_fp16)


def dense_part(param: Tensor) -> Tensor:
    """What of a gradient is to be unscaled: all elements that this process has."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        # Duplicates may overflow only when they are added up, most likely in float16.
        if grad.dtype == torch.float16:
            param.grad = grad = grad.coalesce()
        return grad._values()
    return local(grad)


def inspect(
    gradients: Gradients, inv_scale: Tensor, found_inf: Tensor, process_group: Any
) -> tuple[dict[torch.device, Tensor], Inspection]:
    """Multiply by `inv_scale`, and tell per device whether a result is not finite.

    At an `inv_scale` of 1 nothing is written. `found_inf` becomes the flag of its own device.
    """
    flags: dict[torch.device, Tensor] = {}
    params: list[Tensor] = []
    norms, total_norms = [], {}
    are_whole = gradients.are_whole and process_group is None
    for device, part in gradients.on.items():
        flags[device] = on_device(found_inf, device)
        scale_there = on_device(inv_scale, device)
        rounds = [part]
        try:
            results = [unscale(part, flags[device], scale_there)]
        except ValueError:
            # Of a parameter that is in a group twice, say: torch multiplies once for each.
            rounds = part.rounds()
            if len(rounds) == 1:
                raise
            for once in rounds:  # writes nothing, and refuses those that overlap in part
                unscale(once, flags[device].clone(), torch.ones_like(scale_there))
            results = [unscale(once, flags[device], scale_there) for once in rounds]
            are_whole = False
        params += [param for once in rounds for param in once.params]
        norms += [result.norms for result in results]
        if len(rounds) == 1:
            total_norms[device] = results[0].total_norm
    if gradients.meshes or process_group is not None:
        flags = {found_inf.device: shared(found_inf, flags, gradients.meshes, process_group)}
    return flags, Inspection(weak(params), norms, total_norms, are_whole)


def unscale(part: DeviceGradients, found_inf: Tensor, inv_scale: Tensor) -> ops.UnscaledNorm:
    """Of one device, and what is told of them."""
    return ops.multi_tensor_unscale_norm(part.grads, found_inf, inv_scale, dtype=torch.float64)


@dataclass
class TracedWeakTensors:
    """`_C.WeakTensors` for the compiler, which can make one."""

    references: "list[weakref.ref[Tensor]]"

    def alive(self) -> list[Tensor | None]:
        """None for those that are gone."""
        return [reference() for reference in self.references]


def weak(tensors: list[Tensor]) -> _C.WeakTensors | TracedWeakTensors:
    """References that keep none alive."""
    if torch.compiler.is_compiling():
        return TracedWeakTensors([weakref.ref(tensor) for tensor in tensors])
    return _C.WeakTensors(tensors)


def unscaled_norm(inspections: Iterable[Inspection], scale: Tensor) -> Tensor | None:
    """Of the gradients of all optimizers, as the checks before their steps told it."""
    norms = []
    for inspection in inspections:
        if not inspection.are_whole:
            return None
        for norm in inspection.total_norms.values():
            norm = on_device(norm, scale.device)
            norms.append(norm / scale if inspection.is_scaled else norm)
    return ops.multi_tensor_norm(norms, dtype=torch.float32).total_norm if norms else None


def norm_for(params: list[Tensor], inspection: Inspection) -> Tensor | None:
    """What `clip_grad_norm_` would measure of these parameters' gradients, if it is known."""
    norms = list(inspection.total_norms.values())
    if not inspection.are_whole or not norms:
        return None
    is_double = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    norms = [on_device(norm, norms[0].device) for norm in norms]
    total_norm = norms[0] if len(norms) == 1 else ops.multi_tensor_norm(norms).total_norm
    return total_norm if is_double else total_norm.float()


def shared(
    found_inf: Tensor,
    flags: dict[torch.device, Tensor],
    meshes: dict[tuple[Any, int], None],
    process_group: Any,
) -> Tensor:
    """One flag for all processes, also those that have no gradients here: all skip, or none."""
    flag = largest([found_inf.clone(), *flags.values()])
    groups = [mesh.get_group(dimension) for mesh, dimension in meshes]
    for group in [*groups, *([] if process_group is None else [process_group])]:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
    return flag
