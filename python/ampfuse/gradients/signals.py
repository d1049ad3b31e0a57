"""The facts about gradients with which an optimizer steps, in one value, `Signals`.

Among them are norms from the backward pass, which are valid until a gradient is written.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._arguments import described
from ampfuse._graphs import is_capturing
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


class Slot:
    """The attribute in which a scaler passes its signals while an optimizer steps.

    The compiler traces it, which it does not do with attributes of optimizers.
    """

    _watched: "tuple[Tensor, Version] | None" = None
    _has_stepped_twice = False

    def __init__(self) -> None:
        self.signals: Signals | None = None

    def watch(self, params: Iterable[Tensor]) -> None:
        """Look whether the next step, by the program, is taken with the gradients of now."""
        for param in params:
            if param.grad is not None and not param.grad.is_inference():
                self._watched = param, Version.read(param.grad)
                return

    def note_step(self, signals: "Signals") -> None:
        """Record a step in eager code."""
        if self._watched is None or signals.grad_scale is not None or signals.found_inf is not None:
            return
        param, version = self._watched
        is_same = param.grad is not None and param.grad is version.grad()
        self._has_stepped_twice = is_same and version.unwritten() is not None

    def has_stepped_twice(self) -> bool:
        """Return True if the program has stepped with the gradients of `watch`; look no longer."""
        found, self._has_stepped_twice, self._watched = self._has_stepped_twice, False, None
        return found


class Signals(NamedTuple):
    """The facts that a scaler, the program or a backward pass has found out about gradients."""

    grad_scale: Tensor | None = None
    """The factor by which the gradients are still multiplied, or None for 1."""
    found_inf: Tensor | None = None
    """If this flag is not 0, the step is skipped. None: nobody has looked for overflow."""
    norms: dict[torch.device, Tensor] | None = None
    """Norms of all gradients on each device, as they are now."""
    backward_norms: BackwardNorms | None = None
    """Norms of some gradients, from the backward pass."""

    @staticmethod
    def read(optimizer: Any) -> "Signals":
        """Return the signals for a step: from a scaler, the program, or a backward pass."""
        given: Signals | None = optimizer._slot.signals
        if given is not None:
            return given.add_attributes(optimizer)
        return Signals(backward_norms=BackwardNorms.find(optimizer)).add_attributes(optimizer)

    def add_attributes(self, optimizer: Any) -> "Signals":
        """Return these signals and those that a program has set as attributes of its optimizer.

        The attributes `grad_scale` and `found_inf` are torch's way, in which its own scaler passes
        both.
        """
        scale = getattr(optimizer, "grad_scale", None)
        flag = getattr(optimizer, "found_inf", None)
        if scale is None and flag is None:
            return self
        for name, value in (("grad_scale", scale), ("found_inf", flag)):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected None or a tensor, got {described(value)}")
        if scale is not None and self.grad_scale is not None:
            scale = self.grad_scale * scale
        if flag is not None and self.found_inf is not None:
            flag = torch.maximum(self.found_inf, flag.to(self.found_inf))
        return Signals(
            self.grad_scale if scale is None else scale,
            self.found_inf if flag is None else flag,
            self.norms,
            self.backward_norms,
        )
