"""DTensors, and the shards of them that this rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

_IS_AVAILABLE = torch.distributed.is_available()


@dataclass(frozen=True)
class Sharding:
    """How a DTensor is placed on the ranks of a mesh."""

    mesh: Any
    placements: tuple[Any, ...]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return other tensors unchanged."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def is_dtensor(tensor: Tensor) -> bool:
    """Return True for DTensors. The compiler can trace this, since it only reads an attribute."""
    return getattr(tensor, "device_mesh", None) is not None


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return the shard as a DTensor like `tensor`, or unchanged if `tensor` is a plain tensor."""
    if not is_dtensor(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        shard,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return whole


def elements_before(tensor: Tensor) -> int:
    """Return the number of a DTensor's elements in the shards before that of this rank.

    With shards along the first dimension, it is the index of the shard's first element.
    """
    if not is_dtensor(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    count = 0
    for dim, offset in enumerate(offsets):
        count += prod(sizes[:dim]) * offset * prod(tensor.shape[dim + 1 :])
    return count


def shard_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return a whole tensor, which all ranks have, sharded like `tensor` if that is a DTensor."""
    if not is_dtensor(tensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(tensor.device),
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        src_data_rank=None,  # no communication
    )


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return the sharding of a DTensor, or None for other tensors."""
    if not is_dtensor(tensor):
        return None
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"expected a sharded or replicated gradient, got placements {placements}")
    return Sharding(tensor.device_mesh, placements)  # type: ignore[attr-defined]


def place_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a parameter, placed on the ranks as the parameter is.

    With tensor parallelism, all ranks have the whole gradient of an embedding that is sharded by
    rows. Their shards replace it in `param.grad`.
    """
    sharding = sharding_of(grad)
    placements = getattr(param, "placements", None)  # those of a DTensor
    if sharding is None or placements is None or sharding.placements == placements:
        return grad
    placed: Tensor = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    param.grad = placed
    return placed


def spread_dimensions(placements: Sequence[Any]) -> list[int]:
    """Return the dimensions of a mesh along which ranks hold different parts of a DTensor."""
    return [i for i, placement in enumerate(placements) if not placement.is_replicate()]


def refuse_common_ranks(params: Sequence[Tensor], process_group: Any) -> None:
    """Raise if ranks of the group hold parts of one DTensor: norms would count it for each rank.

    The ranks of a pipeline are a valid group, because each stage has DTensors of its own.
    """
    meshes = {param.device_mesh for param in params if is_dtensor(param)}  # type: ignore[attr-defined]
    for mesh in meshes:
        ranks = torch.distributed.get_process_group_ranks(process_group)
        if len(set(ranks).intersection(mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                "process_group: expected ranks that step other parameters, got ranks that hold "
                "shards of the same DTensors, whose norm covers all shards without a group"
            )


def is_distributed() -> bool:
    """Return True if there may be DTensors. Otherwise no parameter needs to be checked."""
    return _IS_AVAILABLE and torch.distributed.is_initialized()
