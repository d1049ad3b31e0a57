"""Lets ranks write one checkpoint, and load it together.

All ranks call `save` and `load`. States that differ between the ranks, as those of
random numbers and loaders do, are stored for each of them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import hash_of, hash_of_tensor
from ampfuse.checkpoint._tree import Encoder, TensorOf, decoded, in_order, tensors_of
from ampfuse.gradients.shards import is_distributed

OF_RANKS = "$ranks"  # {"$ranks": [a state for each rank]}
Result = TypeVar("Result")


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_0(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0, and return its result on all ranks.

    If it raises, so do all ranks, those other than 0 a CheckpointError.
    """
    rank, size = rank_and_size()
    if size == 1:
        return function()
    outcome: list[Any] = [None, None]
    caught: BaseException | None = None
    if rank == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            caught, outcome[1] = error, str(error)
    dist.broadcast_object_list(outcome, 0)
    if caught is not None:
        raise caught
    if outcome[1] is not None:
        raise CheckpointError(f"rank 0: {outcome[1]}")
    return outcome[0]  # type: ignore[no-any-return]


def on_all_ranks(function: Callable[[], Result]) -> Result:
    """Call a function on all ranks. If it fails on one of them, raise an error on all."""
    _, size = rank_and_size()
    if size == 1:
        return function()
    result: Any = None
    caught: BaseException | None = None
    try:
        result = function()
    except Exception as error:
        caught = error
    errors: list[str | None] = [None] * size
    dist.all_gather_object(errors, None if caught is None else str(caught))
    if caught is not None:
        raise caught
    for rank, text in enumerate(errors):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return result  # type: ignore[no-any-return]


def gathered(value: Result) -> list[Result]:
    """Return the values of all ranks on rank 0; return this rank's value on others."""
    rank, size = rank_and_size()
    values = [value] * size
    if size > 1:
        dist.gather_object(value, values if rank == 0 else None)
    return values if rank == 0 else [value]


def check_same(encode: Encoder, names: list[str]) -> None:
    """Raise an error on all ranks if some rank has other objects, or other tensors in them.

    names: those of all encoded parts, with "values" and "rng".
    """
    _, size = rank_and_size()
    if size == 1:
        return
    lines = [repr(names)]
    for name, tensor in encode.tensors.items():
        if not name.startswith(("values/", "values~")) and name != "values":  # those are of rank 0
            shape = encode.shards[name].shape if name in encode.shards else tensor.shape
            is_sharded = name in encode.shards
            lines.append(f"{name}: {tensor.dtype} of shape {list(shape)}, {is_sharded}")
    own = hash_of("\n".join(lines).encode())
    hashes = [own] * size
    dist.all_gather_object(hashes, own)
    others = [number for number in range(size) if hashes[number] != hashes[0]]
    if others:
        raise CheckpointError(
            f"save: ranks {others} have other objects than rank 0, or other tensors in them; all "
            "ranks must save the same model, whole or sharded"
        )


def merged(encode: Encoder, parts: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Gather the encoded parts of all ranks on rank 0, and encode them again for one checkpoint.

    A part that is the same on all ranks is stored once.
    """
    packed = parts, {name: to_bytes(tensor) for name, tensor in tensors.items()}
    of_ranks = [
        (part, {name: from_bytes(*one) for name, one in tensors.items()})
        for part, tensors in gathered(packed)
    ]
    result = {}
    for name in parts:
        values = [decoded(part[name], in_memory(tensors)) for part, tensors in of_ranks]
        if len({identity(part[name], tensors) for part, tensors in of_ranks}) == 1:
            result[name] = encode(values[0], name)
        else:
            places = (f"{name}/rank-{number}" for number in range(len(of_ranks)))
            result[name] = {OF_RANKS: list(map(encode, values, places))}
    return result


def in_memory(tensors: dict[str, Tensor]) -> TensorOf:
    """Return the function that decodes with these tensors."""

    def tensor_of(name: str, order: list[int] | None) -> Tensor:
        return tensors[name] if order is None else in_order(order, tensors[name])

    return tensor_of


def to_bytes(tensor: Tensor) -> tuple[torch.dtype, torch.Size, Tensor]:
    """Return a tensor as bytes, since pickle does not support all dtypes."""
    # contiguous() and reshape() leave the stride of a tensor with one element as it is.
    dense = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, dense.view(-1).view(torch.uint8)


def from_bytes(dtype: torch.dtype, shape: torch.Size, data: Tensor) -> Tensor:
    """Return a tensor from bytes."""
    return data.view(dtype).reshape(shape)


def identity(part: Any, tensors: dict[str, Tensor]) -> str:
    """Return a fingerprint of encoded values."""
    hashes = [hash_of_tensor(tensors[name]) for name in tensors_of(part)]
    return json.dumps([part, hashes])


def of_this_rank(encoded: Any, what: str, folder: Path) -> Any:
    """Return this rank's part of a value that was encoded on ranks."""
    if not isinstance(encoded, dict) or OF_RANKS not in encoded:
        return encoded
    rank, size = rank_and_size()
    saved = encoded[OF_RANKS]
    if len(saved) != size:
        raise CheckpointError(
            f"{folder}: {what} was saved by {len(saved)} processes, each with a state of its own; "
            f"now there are {size}"
        )
    return saved[rank]
