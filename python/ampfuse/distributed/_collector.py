"""Inspects gradients of parameters when they are complete, many at a time."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._graphs import backward_pass, eager_only, is_capturing, is_in_backward
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.devices import is_served
from ampfuse.gradients.shards import Sharding, local, sharding_of

# Gradients are read when so many bytes have been written: few kernels, and they fit in L2 caches.
BYTES_AT_ONCE = 2**24


class Kind(NamedTuple):
    """Gradients of one kind are read by one kernel, and one norm of a step covers them."""

    device: torch.device
    stream: Any  # the GPU's stream on which they were computed; None on a CPU
    sharding: Sharding | None
    group: int


class Collector:
    """Its `note` is the parameters' hook, which FSDP2 calls after it has reduced a gradient.

    Autograd calls hooks from a thread for each device.
    """

    def __init__(self, known: BackwardNorms, groups: dict[int, int]) -> None:
        self._known, self._groups = known, groups
        self._pending: dict[Kind, list[Tensor]] = {}
        self._on_streams: list[tuple[Any, ops.MultiTensorNorm]] = []
        self._bytes = 0
        self._queued = -1  # the backward pass at the end of which `_finish` is called
        self._lock = threading.RLock()

    @eager_only
    @torch.no_grad()
    def note(self, param: Tensor) -> None:
        """Take note of a gradient. This is a hook of the parameter."""
        grad = param.grad
        if grad is None or not is_in_backward() or is_capturing():
            return  # a captured step computes its norms itself
        part = local(grad)
        # FSDP2's gradients on the CPU may still be on their way from a GPU.
        if part.is_sparse or not is_served(part.device) or part.is_pinned():
            return
        stream = torch.cuda.current_stream(part.device) if part.is_cuda else None
        kind = Kind(part.device, stream, sharding_of(grad), self._groups.get(id(param), -1))
        with self._lock:
            if self._queued != backward_pass():
                if self._queued >= 0:  # that pass has raised, or this one runs inside it
                    self._pending, self._bytes = {}, 0
                self._queued = backward_pass()
                call_at_the_end(self._finish)
            self._pending.setdefault(kind, []).append(grad)
            self._bytes += part.nbytes
            if self._bytes >= BYTES_AT_ONCE:
                self._inspect()

    @torch.no_grad()
    def _inspect(self) -> None:
        pending, self._pending, self._bytes = self._pending, {}, 0
        for kind, grads in pending.items():
            with torch.cuda.stream(kind.stream):  # nothing on a CPU
                parts = [local(grad) for grad in grads]
                result = ops.multi_tensor_norm(parts, dtype=torch.float64)
            self._known.add(grads, result)
            if kind.stream is not None:
                self._on_streams.append((kind.stream, result))

    def _finish(self) -> None:
        with self._lock:
            self._known.forget_stale()
            self._inspect()
            for stream, result in self._on_streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
                keep_for_current_stream(result)
            self._on_streams, self._queued = [], -1


def call_at_the_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the present backward pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def keep_for_current_stream(result: ops.MultiTensorNorm) -> None:
    """Keep memory that another stream of a GPU has allocated until the current one has used it."""
    for norm in (result.total_norm, result.norms, result.found_inf):
        if norm.is_cuda:
            norm.record_stream(torch.cuda.current_stream(norm.device))
