"""Lets ranks write one checkpoint, and load it together.

All ranks call `save` and `load`. States that differ between the ranks, as those of
random numbers and loaders do, are stored for each of them.
"""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import hash_of, hash_of_tensor
from ampfuse.checkpoint._tree import Encoder, TensorOf, decoded, put_in_order
from ampfuse.gradients.shards import is_distributed

OF_RANKS = "$ranks"  # {"$ranks": [a state for each rank]}
Result = TypeVar("Result")


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_on_all_ranks(function: Callable[[], Result]) -> Result:
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


def get_from_rank_0(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0, and return its result, or raise an error, on all ranks."""
    rank, size = rank_and_size()
    results: list[Any] = [run_on_all_ranks(lambda: function() if rank == 0 else None)]
    if size > 1:
        dist.broadcast_object_list(results, 0)
    return results[0]  # type: ignore[no-any-return]


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
            shard = encode.shards.get(name)
            shape = list(tensor.shape if shard is None else shard.shape)
            lines.append(f"{name}: {tensor.dtype} of shape {shape}, {shard is None}")
    own = hash_of("\n".join(lines).encode())
    hashes = [own] * size
    dist.all_gather_object(hashes, own)
    others = [number for number in range(size) if hashes[number] != hashes[0]]
    if others:
        raise CheckpointError(
            f"save: ranks {others} have other objects than rank 0, or other tensors in them; all "
            "ranks must save the same model, whole or sharded"
        )


def pack(states: dict[str, Any]) -> bytes:
    """Encode this rank's states, and return them in bytes."""
    packed = {}
    for name, state in states.items():
        encode = Encoder()
        encoded = encode(state, name)
        # A copy has no memory besides its elements. contiguous() and reshape() would leave the
        # stride of a tensor with one element as it is.
        tensors = {
            key: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for key, tensor in encode.tensors.items()
        }
        hashes = [hash_of_tensor(tensor) for tensor in tensors.values()]
        packed[name] = encoded, tensors, json.dumps([encoded, hashes])
    file = BytesIO()
    torch.save(packed, file)  # pickle alone does not support all dtypes
    return file.getvalue()


def merge(encode: Encoder, packed: bytes) -> dict[str, Any]:
    """Encode the packed states of all ranks on rank 0; return nothing on other ranks.

    A state that is the same on all ranks is stored once.
    """
    received = gathered(packed)
    if rank_and_size()[0] != 0:
        return {}
    of_ranks = [torch.load(BytesIO(data), map_location="cpu") for data in received]
    result = {}
    for name in of_ranks[0]:
        parts = [states[name] for states in of_ranks]
        values = [decoded(encoded, read_memory(tensors)) for encoded, tensors, _ in parts]
        if len({text for *_, text in parts}) == 1:
            result[name] = encode(values[0], name)
        else:
            places = (f"{name}/rank-{number}" for number in range(len(parts)))
            result[name] = {OF_RANKS: list(map(encode, values, places))}
    return result


def read_memory(tensors: dict[str, Tensor]) -> TensorOf:
    """Return the function that decodes with these tensors."""

    def tensor_of(name: str, order: list[int] | None) -> Tensor:
        return tensors[name] if order is None else put_in_order(order, tensors[name])

    return tensor_of


def pick_for_this_rank(encoded: Any, what: str, folder: Path) -> Any:
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
