"""The shards of DTensors, each stored as a piece of the whole tensor.

A checkpoint does not depend on the number of processes: a rank reads the pieces that overlap with
its own shard.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Region(NamedTuple):
    """A part of a tensor."""

    start: Sequence[int]
    shape: Sequence[int]

    def slices(self) -> tuple[slice, ...]:
        """Return the index of the region in the whole tensor."""
        return tuple(slice(a, a + size) for a, size in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Region") -> "Region":
        """Return what two regions have in common."""
        start = list(map(max, self.start, other.start))
        pairs = zip(self.slices(), other.slices(), strict=True)
        ends = [min(one.stop, another.stop) for one, another in pairs]
        return Region(start, [max(end - a, 0) for a, end in zip(start, ends, strict=True)])

    def within(self, other: "Region") -> tuple[slice, ...]:
        """Return the index of the region in the other one, which contains it."""
        start = [a - b for a, b in zip(self.start, other.start, strict=True)]
        return Region(start, self.shape).slices()


class Shard(NamedTuple):
    """The part of a DTensor that this rank holds."""

    shape: Sequence[int]
    """The shape of the whole tensor."""
    region: Region
    is_first: bool
    """False if a rank before this one holds the same region."""


def shard_of(tensor: Any, name: str) -> Shard:
    """Return the part of a DTensor that this rank holds; raise with this name if it has none."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or not is_one_region(tensor.shape, mesh, placements):
        raise TypeError(f"{name}: checkpoints of {placements} on {mesh} are not supported")
    (chunk,) = tensor.__create_chunk_list__()
    is_first = not any(
        place
        for place, placement in zip(coordinate, placements, strict=True)
        if placement.is_replicate()
    )
    return Shard(tensor.shape, Region(chunk.offsets, chunk.sizes), is_first)


def is_one_region(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> bool:
    """Return True if each rank holds one region of the tensor.

    Strided shards, as of a tensor parallel model in FSDP, do so if they undo the order in which
    the dimensions of the mesh are counted.
    """
    for number, placement in enumerate(placements):
        if placement.is_partial():
            return False
        factor = getattr(placement, "split_factor", None)
        if factor is not None:
            others = [
                mesh.size(other)
                for other in range(number + 1, mesh.ndim)
                if getattr(placements[other], "dim", None) == placement.dim
            ]
            is_even = shape[placement.dim] % (factor * mesh.size(number)) == 0
            if prod(others) != factor or not is_even:
                return False
    return True


def assembled(
    region: Region, pieces: Iterable[tuple[Region, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Return a region of a tensor from the pieces that overlap with it."""
    result = torch.empty(region.shape, dtype=dtype)
    for where, piece in pieces:
        common = region.overlap(where)
        result[common.within(region)] = piece[common.within(where)]
    return result
