"""One read of an optimizer's gradients, wherever they are: unscaled, looked through, measured."""

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import _known_norm, ops
from ampfuse.optim._grad_norm import largest, spread_dimensions
from ampfuse.optim._state import is_sharded, local


@dataclass
class DeviceGradients:
    """Those on one device, as the kernels take them."""

    params: list[Tensor]
    grads: list[Tensor]
    meshes: dict[tuple[Any, int], None]  # mesh dimensions over which gradients are spread


@dataclass
class Inspection:
    """What one look at an optimizer's gradients told; all on the devices of the gradients."""

    params: list[Tensor]
    norms: list[Tensor]  # of the parameters' gradients, one tensor per device
    total_norms: list[Tensor]  # one per device
    is_whole: bool  # whether this process has all elements of all gradients
    is_scaled: bool = False  # whether the norms are of gradients that are scaled still


def gather(optimizer: Optimizer, allow_fp16: bool) -> dict[torch.device, DeviceGradients]:
    """The gradients of all groups."""
    found: dict[torch.device, DeviceGradients] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if not isinstance(param, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(param)}")
            if param.grad is None:
                continue
            if param.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. Parameter "
                    f"{index} of group {group_index} is {param.dtype} of shape "
                    f"{tuple(param.shape)}: keep parameters in float32 under autocast, or make "
                    "the scaler with allow_fp16_grads=True for an optimizer that has masters"
                )
            grad = dense_part(param)
            part = found.setdefault(grad.device, DeviceGradients([], [], {}))
            part.params.append(param)
            part.grads.append(grad)
            if is_sharded(param.grad):
                sharded: Any = param.grad
                spread = spread_dimensions(sharded.placements)
                part.meshes |= {(sharded.device_mesh, i): None for i in spread}
    return found


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
    gradients: dict[torch.device, DeviceGradients],
    inv_scale: Tensor,
    found_inf: Tensor,
    process_group: Any,
) -> tuple[dict[torch.device, Tensor], Inspection]:
    """Multiply by `inv_scale`, and tell per device whether a result is not finite.

    At an `inv_scale` of 1 nothing is written.
    """
    flags: dict[torch.device, Tensor] = {}
    norms, total_norms = [], []
    meshes: dict[tuple[Any, int], None] = {}
    for device, part in gradients.items():
        flags[device] = found_inf.to(device, non_blocking=True, copy=True)
        inverse = inv_scale.to(device, non_blocking=True)
        result = ops.multi_tensor_unscale_norm(part.grads, flags[device], inverse)
        norms.append(result.norms)
        total_norms.append(result.total_norm)
        meshes |= part.meshes
    if meshes or process_group is not None:
        flags = {found_inf.device: shared(found_inf, flags, meshes, process_group)}
    params = [param for part in gradients.values() for param in part.params]
    grads = [grad for part in gradients.values() for grad in part.grads]
    is_whole = not meshes and all(map(is_, (param.grad for param in params), grads))
    if is_whole and len(total_norms) == 1:
        _known_norm.remember(grads, total_norms[0])
    return flags, Inspection(params, norms, total_norms, is_whole)


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
