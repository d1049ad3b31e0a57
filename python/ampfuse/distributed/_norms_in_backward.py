"""Computes norms during backward, so that unscaling, clipping and the step read gradients once.

Gradients are read soon after they were written, so mostly from caches, and while other gradients
are computed or sent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import ops
from ampfuse._devices import is_served
from ampfuse._dtensors import Sharding, local, sharding_of
from ampfuse.optim import Adam
from ampfuse.optim._backward_norms import BackwardNorms

# Gradients are read when so many bytes have been written: few kernels, and they fit in L2 caches.
BYTES_AT_ONCE = 2**24


class Norms:
    """The hooks that `norms_in_backward` has installed; `remove()` removes them."""

    def __init__(self, optimizer: Adam, remove: Callable[[], None]) -> None:
        self._optimizer, self._remove = optimizer, remove

    def remove(self) -> None:
        """Compute norms in the step again."""
        self._remove()
        self._optimizer._backward_norms = None


def norms_in_backward(
    model: nn.Module, optimizer: Adam, comm_hook: tuple[Any, Callable[..., Any]] | None = None
) -> Norms:
    """Compute the norms that a step needs during backward: its gradients are then read once.

    Call this after the model was wrapped: it may be a DistributedDataParallel, a model with
    `fully_shard` or tensor parallelism, or a plain module. The step uses the norms if it clips
    (`max_grad_norm`) or if an `ampfuse.GradScaler` steps it. Gradients that were written after
    backward, for example by a clipping function, are read again. Writes through `.data` are not
    noticed.

    `comm_hook`: state and hook that DDP would get from `register_comm_hook`; by default gradients
    are averaged.

    >>> import torch, ampfuse
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
    >>> norms = ampfuse.distributed.norms_in_backward(model, optimizer)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, Adam):
        raise TypeError(
            f"optimizer: expected ampfuse.Adam or AdamW, got {type(optimizer).__name__}"
        )
    known = optimizer._backward_norms = BackwardNorms()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        buckets = _Buckets(known, comm_hook or _averaging(model))
        model.register_comm_hook(buckets, _reduce_and_inspect)
        return Norms(optimizer, buckets.stop)
    if comm_hook is not None:
        raise ValueError("comm_hook: expected None, since the model is not DDP's")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    collector = _Collector(known)
    handles = [
        param.register_post_accumulate_grad_hook(collector.note)
        for param in params
        if param.requires_grad
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return Norms(optimizer, remove)


class _Collector:
    """Inspects gradients of parameters when they are complete, many at a time.

    FSDP2 calls the hooks of parameters after it has reduced their gradients.
    """

    def __init__(self, known: BackwardNorms) -> None:
        self._known = known
        self._pending: dict[tuple[torch.device, Sharding | None], list[Tensor]] = {}
        self._bytes = 0
        self._backward = -1  # autograd's number of the backward pass

    def note(self, param: Tensor) -> None:
        """Take note of a gradient. This is a hook of the parameter."""
        grad = param.grad
        assert grad is not None
        part = local(grad.detach())
        # FSDP2's gradients on the CPU may still be on their way from a GPU.
        if part.is_sparse or not is_served(part.device) or part.is_pinned():
            return
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:  # the one before may have raised
            self._pending, self._bytes, self._backward = {}, 0, backward
            _at_the_end(self._finish)
        part = local(grad)
        self._pending.setdefault((part.device, sharding_of(grad)), []).append(part)
        self._bytes += part.nbytes
        if self._bytes >= BYTES_AT_ONCE:
            self._inspect()

    def _inspect(self) -> None:
        pending, self._pending, self._bytes = self._pending, {}, 0
        for grads in pending.values():
            self._known.add(grads, ops.multi_tensor_norm(grads, dtype=torch.float64))

    def _finish(self) -> None:
        self._known.forget_stale()
        self._inspect()


class _Buckets:
    """The state of DDP's communication hook."""

    def __init__(self, known: BackwardNorms, comm_hook: tuple[Any, Callable[..., Any]]) -> None:
        self._known, self.comm_hook, self.stopped = known, comm_hook, False
        self._pending: list[tuple[list[Tensor], ops.MultiTensorNorm]] = []

    def stop(self) -> None:
        """Only reduce from now on, since DDP keeps its hook."""
        self.stopped = True

    def begin(self) -> None:
        """Prepare for the buckets of a backward pass. The one before may have raised."""
        self._pending = []
        # DDP copies reduced buckets to gradients at the end of backward, after callbacks that exist
        # already. So the callback that finishes is added by another one.
        _at_the_end(lambda: _at_the_end(self._finish))

    def inspect(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self._pending.append((params, ops.multi_tensor_norm(grads, dtype=torch.float64)))

    def _finish(self) -> None:
        self._known.forget_stale()
        pending, self._pending = self._pending, []
        for params, result in pending:
            grads = [param.grad for param in params if param.grad is not None]
            if len(grads) == len(params):  # or some were not used in this backward pass
                self._known.add(grads, result)
            for norm in (result.total_norm, result.norms, result.found_inf):
                if norm.is_cuda:  # allocated on the stream of the communication
                    norm.record_stream(torch.cuda.current_stream(norm.device))


def _averaging(model: nn.parallel.DistributedDataParallel) -> tuple[Any, Callable[..., Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return model.process_group, allreduce_hook


# DDP checks the annotations of a hook.
def _reduce_and_inspect(
    buckets: _Buckets,
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    state, hook = buckets.comm_hook
    reduction: torch.futures.Future[Any] = hook(state, bucket)
    if buckets.stopped:
        return reduction
    if bucket.index() == 0:
        buckets.begin()
    start = bucket.buffer().storage_offset()
    params = bucket.parameters()
    places = [(grad.storage_offset() - start, grad.numel()) for grad in bucket.gradients()]

    def inspect(future: Any) -> Tensor:
        value = future.value()
        reduced: Tensor = value[0] if isinstance(value, list) else value
        buckets.inspect(params, [reduced[first : first + size] for first, size in places])
        return reduced

    return reduction.then(inspect)


def _at_the_end(callback: Callable[[], None]) -> None:
    """Call a function at the end of the present backward pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
