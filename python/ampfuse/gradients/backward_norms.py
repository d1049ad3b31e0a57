"""Norms that are computed in the backward pass. They are valid until a gradient is written."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._graphs import is_capturing
from ampfuse.gradients.version import Version


class Record(NamedTuple):
    """The norms of some gradients of one device and sharding, when they had these versions."""

    versions: list[Version]
    result: ops.MultiTensorNorm

    def unwritten(self) -> list[Tensor] | None:
        """Return the gradients, or shards of them, if none was freed or written since."""
        grads = [version.unwritten() for version in self.versions]
        return None if any(grad is None for grad in grads) else grads  # type: ignore[return-value]


class BackwardNorms:
    """The records of the last backward pass."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @staticmethod
    def find(optimizer: Any) -> "BackwardNorms | None":
        """Return the norms that are computed for an optimizer. Graphs compute their own."""
        if torch.compiler.is_compiling() or not _OF_OPTIMIZERS or is_capturing():
            return None
        return _OF_OPTIMIZERS.get(optimizer)

    def attach(self, optimizer: Any) -> None:
        """Let the optimizer's steps use these norms."""
        _OF_OPTIMIZERS[optimizer] = self

    def detach(self, optimizer: Any) -> None:
        """Undo `attach`, unless other norms were attached since."""
        if _OF_OPTIMIZERS.get(optimizer) is self:
            del _OF_OPTIMIZERS[optimizer]

    @torch.no_grad()
    def add(self, grads: list[Tensor], result: ops.MultiTensorNorm) -> None:
        """Record the norms of gradients that have just been computed."""
        self._records.append(Record([Version.read(grad) for grad in grads], result))

    def forget_stale(self) -> None:
        """Drop the records of gradients that were freed or written."""
        self._records = [record for record in self._records if record.unwritten() is not None]

    def split(self, grads: list[Tensor]) -> tuple[list[tuple[list[int], Record]], list[int]]:
        """Return the records of these gradients, with their indices, and the other indices.

        `grads`: plain tensors, or the shards of DTensors.
        """
        index_of = {id(grad): index for index, grad in enumerate(grads)}
        rest, found = set(range(len(grads))), []
        for record in self._records:
            indices = [index_of.get(id(grad), -1) for grad in record.unwritten() or ()]
            if indices and rest.issuperset(indices):
                found.append((indices, record))
                rest.difference_update(indices)
        return found, sorted(rest)


_OF_OPTIMIZERS: "weakref.WeakKeyDictionary[Any, BackwardNorms]" = weakref.WeakKeyDictionary()
