"""Inspects the buckets of gradients that DistributedDataParallel has reduced."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse._graphs import is_in_backward
from ampfuse.distributed._collector import call_at_the_end, keep_for_current_stream
from ampfuse.gradients.backward_norms import BackwardNorms


class Buckets:
    """The state of DDP's communication hook."""

    def __init__(
        self,
        known: BackwardNorms,
        groups: dict[int, int],
        comm_hook: tuple[Any, Callable[..., Any]],
    ) -> None:
        self._known, self._groups = known, groups
        self._comm_hook, self._stopped = comm_hook, False
        self._pending: list[tuple[list[Tensor], ops.MultiTensorNorm]] = []

    def stop(self) -> None:
        """Only reduce from now on, since DDP keeps its hook."""
        self._stopped = True

    def hook(  # DDP checks these annotations
        self,
        bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Reduce a bucket, and inspect it when it has been reduced."""
        state, reduce = self._comm_hook
        reduction: torch.futures.Future[Any] = reduce(state, bucket)
        if self._stopped or not is_in_backward():  # a rank that has joined runs no backward pass
            return reduction
        if bucket.index() == 0:
            self._pending = []  # of a backward pass that raised
            # DDP copies reduced buckets to gradients at the end of backward, after callbacks that
            # exist already. So the callback that finishes is added by another one.
            call_at_the_end(lambda: call_at_the_end(self._finish))
        buffer, params = bucket.buffer(), bucket.parameters()
        start, dtype = buffer.storage_offset(), buffer.dtype
        slices = [(grad.storage_offset() - start, grad.numel()) for grad in bucket.gradients()]

        def inspect(future: Any) -> Tensor:
            value = future.value()
            reduced: Tensor = value[0] if isinstance(value, list) else value
            rounded = reduced.to(dtype)  # as DDP copies it
            self._inspect(params, [rounded[first : first + size] for first, size in slices])
            return reduced

        return reduction.then(inspect)

    def _inspect(self, params: list[Tensor], grads: list[Tensor]) -> None:
        groups = defaultdict[int, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        for param, grad in zip(params, grads, strict=True):
            if id(param) in self._groups:
                of_params, of_grads = groups[self._groups[id(param)]]
                of_params.append(param)
                of_grads.append(grad)
        for of_params, of_grads in groups.values():
            result = ops.multi_tensor_norm(of_grads, dtype=torch.float64)
            self._pending.append((of_params, result))

    def _finish(self) -> None:
        self._known.forget_stale()
        pending, self._pending = self._pending, []
        for params, result in pending:
            grads = [param.grad for param in params if param.grad is not None]
            if len(grads) == len(params):  # or some were not used in this backward pass
                self._known.add(grads, result)
            keep_for_current_stream(result)
