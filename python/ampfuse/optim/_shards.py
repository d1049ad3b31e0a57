"""Conversions between DTensors and the shards that this rank holds."""

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return other tensors unchanged."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def is_sharded(tensor: Tensor) -> bool:
    """Return True for DTensors. The compiler can trace their attributes, but not their methods."""
    return getattr(tensor, "device_mesh", None) is not None


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a shard as a DTensor if `tensor` is one; otherwise return it unchanged."""
    if not is_sharded(tensor):
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
