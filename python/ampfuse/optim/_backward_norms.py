"""Norms of gradients that were computed during backward, and whether they are still valid."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._devices import largest


class Record(NamedTuple):
    """The norms of some gradients of one device and sharding, when they had these versions."""

    grads: list["weakref.ref[Tensor]"]  # weak, so that gradients can be freed
    versions: list[int]
    result: ops.MultiTensorNorm

    def alive(self) -> list[Tensor] | None:
        """Return the gradients if all still exist, and none was written since."""
        grads = []
        for reference, version in zip(self.grads, self.versions, strict=True):
            grad = reference()
            if grad is None or grad._version != version:
                return None
            grads.append(grad)
        return grads


class BackwardNorms:
    """The records of the last backward pass."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def add(self, grads: list[Tensor], result: ops.MultiTensorNorm) -> None:
        """Record the norms of gradients that have just been computed."""
        versions = [grad._version for grad in grads]
        self._records.append(Record([weakref.ref(grad) for grad in grads], versions, result))

    def forget_stale(self) -> None:
        """Drop the records of gradients that were freed or written."""
        self._records = [record for record in self._records if record.alive() is not None]

    def split(self, grads: list[Tensor]) -> tuple[list[tuple[list[int], Record]], list[int]]:
        """Return the records of these gradients, with their indices, and the other indices."""
        index_of = {id(grad): index for index, grad in enumerate(grads)}
        rest, found = set(range(len(grads))), []
        for record in self._records:
            indices = [index_of.get(id(grad), -1) for grad in record.alive() or ()]
            if indices and rest.issuperset(indices):
                found.append((indices, record))
                rest.difference_update(indices)
        return found, sorted(rest)


def inspected_list(grads: list[Tensor], known: BackwardNorms | None) -> tuple[Tensor, Tensor]:
    """Return norm and flag of gradients; read only those whose norms are not known."""
    found, rest = ([], list(range(len(grads)))) if known is None else known.split(grads)
    results = [record.result for _, record in found]
    if rest:
        results.append(ops.multi_tensor_norm([grads[i] for i in rest], dtype=torch.float64))
    total_norm = total([result.total_norm for result in results])
    return total_norm, largest([result.found_inf for result in results])


def total(norms: list[Tensor]) -> Tensor:
    """Return the norm of lists of gradients from the norm of each."""
    if len(norms) == 1:
        return norms[0]
    return ops.multi_tensor_norm(norms, dtype=torch.float64).total_norm
