"""Computes norms during backward, so that unscaling, clipping and the step read gradients once.

Gradients are read soon after they were written, so mostly from caches, and while other gradients
are computed or sent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampfuse._arguments import type_name
from ampfuse._nested import params_of, unwrapped
from ampfuse.distributed._buckets import Buckets
from ampfuse.distributed._collector import Collector
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.shards import is_distributed, is_dtensor
from ampfuse.optim import FusedOptimizer


class NormHooks:
    """The hooks that `norms_in_backward` has installed; `remove()` removes them."""

    def __init__(
        self, optimizer: FusedOptimizer, known: BackwardNorms, remove: Callable[[], None]
    ) -> None:
        self._optimizer, self._known, self._remove = optimizer, known, remove

    def remove(self) -> None:
        """Compute norms in the step again. DDP keeps its hook, and cannot get another one."""
        self._remove()
        self._known.detach(self._optimizer)


def norms_in_backward(
    model: nn.Module, optimizer: Any, comm_hook: tuple[Any, Callable[..., Any]] | None = None
) -> NormHooks:
    """Compute the step's norms during backward, so that the step reads gradients only once.

    Call this after the model was wrapped. On several ranks it must be a DistributedDataParallel, or
    have DTensors (`fully_shard`, tensor parallelism). Other gradients may still be added up over
    the ranks after backward, so they are read in the step. Without ranks it may be any module.

    The step uses the norms if it clips (`max_grad_norm`) or if an `ampfuse.GradScaler` steps it.
    Gradients that were written after backward, for example by a clipping function, are read again.
    Writes that torch does not count are not noticed: those through `.data` and numpy, those of
    collectives, and those of `torch.nn.utils.clip_grad_norm_` to DTensors. Clip by `max_grad_norm`
    or `ampfuse.clip_grad_norm_`.

    Args:
        model: The module that computes the gradients, after wrapping.
        optimizer: `ampfuse.Adam`, `AdamW` or `SGD`, which may be wrapped, for example by
            Accelerate.
        comm_hook: State and hook that DDP would get from `register_comm_hook`; by default gradients
            are averaged. Only for DDP.

    Returns:
        An object whose method `remove()` removes the hooks.

    Raises:
        TypeError: The optimizer is another one.
        ValueError: The model's gradients may be reduced after backward, or `comm_hook` is given
            without DDP.

    Examples:
        >>> import torch, ampfuse
        >>> from ampfuse.distributed import norms_in_backward
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> norms = norms_in_backward(model, optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer: expected ampfuse.Adam, AdamW or SGD, got {type_name(optimizer)}"
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    known, groups = BackwardNorms(), _groups_of_norms(optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        buckets = Buckets(known, groups, comm_hook or _averaging(model))
        model.register_comm_hook(buckets, Buckets.hook)
        known.attach(optimizer)
        return NormHooks(optimizer, known, buckets.stop)
    if comm_hook is not None:
        raise ValueError("comm_hook: expected None without a DistributedDataParallel")
    params = _complete_after_backward(model, optimizer)
    collector = Collector(known, groups)
    handles = [
        param.register_post_accumulate_grad_hook(collector.note)  # type: ignore[no-untyped-call]
        for param in params
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    known.attach(optimizer)
    return NormHooks(optimizer, known, remove)


def _groups_of_norms(optimizer: FusedOptimizer) -> dict[int, int]:
    """Return the group of each parameter, by its id; -1 for all groups that share a norm."""
    found: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        shares = optimizer.options_of(group)["max_grad_norm"] is None
        found |= {id(param): -1 if shares else index for param in group["params"]}
    return found


def _complete_after_backward(model: nn.Module, optimizer: FusedOptimizer) -> list[torch.Tensor]:
    """Return the parameters whose gradients nobody reduces after backward."""
    params = [param for param in params_of(optimizer) if param.requires_grad]
    if not (is_distributed() and torch.distributed.get_world_size() > 1):
        return params
    from torch.distributed.fsdp import FullyShardedDataParallel

    reducers = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
    has_reducer = any(isinstance(module, reducers) for module in model.modules())
    params = [param for param in params if is_dtensor(param)]
    if has_reducer or not params:
        raise ValueError(
            "model: expected a DistributedDataParallel itself, or a model with DTensors, as from "
            "fully_shard; the gradients of this one may be reduced after backward"
        )
    return params


def _averaging(model: nn.parallel.DistributedDataParallel) -> tuple[Any, Callable[..., Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return model.process_group, allreduce_hook
