"""Finds the ranks that step other parameters of the same model, and joins them."""

from typing import Any, NamedTuple

from torch import nn

from ampfuse.amp import GradScaler
from ampfuse.optim import Adam


class Joined(NamedTuple):
    """The result of `join_ranks`."""

    process_group: Any
    """The group that the optimizer and the scaler got, or None if they need none."""
    reason: str
    """A sentence about the model."""


def join_ranks(
    model: nn.Module,
    optimizer: Any = None,
    scaler: GradScaler | None = None,
    *,
    pipeline: Any = None,
) -> Joined:
    """Give optimizer and scaler the process group that a model needs, if it needs one.

    Ranks that hold other parameters of the same model must clip by one norm, and skip the same
    steps. DTensors (`fully_shard`, tensor parallelism) need no group, since they know their ranks,
    and neither does DistributedDataParallel, whose ranks have the same gradients. A group is needed
    by FSDP1, whose shards are plain tensors, by the stages of a pipeline, and by a
    ZeroRedundancyOptimizer of ours.

    Call this after the model was wrapped, and before the first step. `model` is the module that
    this rank holds. `pipeline`: its stage (`torch.distributed.pipelining.PipelineStage`).

    >>> import torch, ampfuse
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer, scaler = ampfuse.AdamW(model.parameters()), ampfuse.GradScaler("cpu")
    >>> ampfuse.distributed.join_ranks(model, optimizer, scaler).reason
    'Each rank steps all parameters, or its shards of DTensors: no group is needed.'
    """
    found = _groups(model, optimizer, pipeline)
    if not found:
        return Joined(
            None, "Each rank steps all parameters, or its shards of DTensors: no group is needed."
        )
    if len({id(group) for group, _ in found}) > 1:
        reasons = " ".join(reason for _, reason in found)
        raise ValueError(f"model: expected one process group, got {len(found)}. {reasons}")
    group, reason = found[0]
    inner = getattr(optimizer, "optim", optimizer)  # that of a ZeroRedundancyOptimizer
    if inner is not None:
        if not isinstance(inner, Adam):
            raise TypeError(
                f"optimizer: expected ampfuse.Adam or AdamW, got {type(inner).__name__}. {reason}"
            )
        if inner._unscale == "before":
            raise ValueError('unscale: expected "auto" or "in_step" with a process_group')
        inner.process_group = group
    if scaler is not None:
        scaler.process_group = group
    return Joined(group, reason)


def _groups(model: nn.Module, optimizer: Any, pipeline: Any) -> list[tuple[Any, str]]:
    """Return the process groups that are needed, each with a reason."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        if (
            isinstance(module, FullyShardedDataParallel)
            and module.sharding_strategy != ShardingStrategy.NO_SHARD
        ):
            group = module.process_group
            found[id(group)] = group, "FSDP1 gives each rank plain shards of all parameters."
    if pipeline is not None:
        group = pipeline.group if pipeline.group is not None else dist.group.WORLD
        found[id(group)] = group, "The stages of a pipeline have other parameters."
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        group = optimizer.process_group
        found[id(group)] = group, "A ZeroRedundancyOptimizer steps other parameters on each rank."
    return list(found.values())
