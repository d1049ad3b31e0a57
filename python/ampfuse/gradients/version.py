"""Versions of gradients, by which it is known whether anything has written them since."""

import weakref
from typing import NamedTuple

from torch import Tensor

from ampfuse.gradients.shards import local


class Version(NamedTuple):
    """A gradient and its number of writes, which a DTensor and its shard count separately."""

    grad: "weakref.ref[Tensor]"  # weak, so that gradients can be freed
    shard: "weakref.ref[Tensor]"
    writes: int

    @staticmethod
    def read(grad: Tensor) -> "Version":
        """Return the present version."""
        shard = local(grad)
        return Version(weakref.ref(grad), weakref.ref(shard), grad._version + shard._version)

    def unwritten(self) -> Tensor | None:
        """Return the shard if both still exist, and none was written since."""
        grad, shard = self.grad(), self.shard()
        if grad is None or shard is None or grad._version + shard._version != self.writes:
            return None
        return shard
