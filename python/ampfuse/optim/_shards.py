"""DTensors as the shards that this process has of them."""

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. The compiler knows of their attributes, not of their methods."""
    return getattr(tensor, "device_mesh", None) is not None


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """A shard as a DTensor, if the other tensor is one."""
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
