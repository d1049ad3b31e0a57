"""Finds the ranks that step other parameters of the same model, and joins them."""

from typing import Any, NamedTuple

from torch import nn

from ampfuse._arguments import type_name
from ampfuse._nested import unwrapped
from ampfuse.amp import GradScaler
from ampfuse.gradients.shards import is_distributed
from ampfuse.optim import FusedOptimizer

NOT_NEEDED = (
    "Each rank steps all parameters, or its shards of DTensors: no group is needed. For a stage of "
    "a pipeline pass pipeline=stage."
)


class Joined(NamedTuple):
    """The result of `join_ranks`."""

    process_group: Any
    """The group that the optimizer and the scaler got, or None if they need none."""
    reason: str
    """Why the group is needed, or why none is."""


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
    ZeroRedundancyOptimizer that constructs `ampfuse.AdamW`.

    Call this after the model was wrapped, and before the first step.

    Args:
        model: The module that this rank holds.
        optimizer: `ampfuse.Adam`, `AdamW` or `SGD`, which may be wrapped; its `process_group` is
            set.
        scaler: An `ampfuse.GradScaler`, whose `process_group` is set, or None.
        pipeline: The stage of a pipeline (`torch.distributed.pipelining.PipelineStage`), or None.

    Returns:
        The group, or None if none is needed, and the reason.

    Raises:
        ValueError: Several groups are needed, FSDP1 leaves a parameter whole, or the group does not
            go with an option of the optimizer or the scaler.
        TypeError: A group is needed, and the optimizer or the scaler is not ampfuse's.

    Examples:
        >>> import torch, ampfuse
        >>> from ampfuse.distributed import join_ranks
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer, scaler = ampfuse.AdamW(model.parameters()), ampfuse.GradScaler("cpu")
        >>> print(join_ranks(model, optimizer, scaler).process_group)
        None
    """
    found = _groups(model, optimizer, pipeline)
    if not found:
        return Joined(None, NOT_NEEDED)
    if len(found) > 1:
        reasons = " ".join(reason for _, reason in found)
        raise ValueError(f"model: expected one process group, got {len(found)}. {reasons}")
    group, reason = found[0]
    inner = unwrapped(optimizer)
    if inner is not None and not isinstance(inner, FusedOptimizer):
        raise TypeError(
            f"optimizer: expected ampfuse.Adam, AdamW or SGD, got {type_name(inner)}. {reason}"
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler: expected ampfuse.GradScaler, got {type(scaler)}. {reason}")
    if inner is not None:
        inner.check_process_group(group)
    if scaler is not None:
        scaler.policy.check_process_group(group)
        scaler.process_group = group
    if inner is not None:
        inner.process_group = group
    return Joined(group, reason)


def _groups(model: nn.Module, optimizer: Any, pipeline: Any) -> list[tuple[Any, str]]:
    """Return the process groups that are needed, each with a reason."""
    import torch.distributed as dist

    if not is_distributed():
        return []
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = [
        (group, "FSDP1 gives each rank plain shards of all parameters.") for group in _fsdp1(model)
    ]
    if pipeline is not None:
        group = pipeline.group if pipeline.group is not None else dist.group.WORLD
        found.append((group, "Each stage of a pipeline has different parameters."))
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        reason = "A ZeroRedundancyOptimizer steps different parameters on each rank."
        found.append((optimizer.process_group, reason))
    by_ranks = {tuple(dist.get_process_group_ranks(group)): (group, why) for group, why in found}
    return list(by_ranks.values())


def _fsdp1(model: nn.Module) -> list[Any]:
    """Return the groups of FSDP1's shards; raise if some parameters are on all ranks, not sharded.

    The norm over the group would count these once for each rank.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    modules = [one for one in model.modules() if isinstance(one, FullyShardedDataParallel)]
    shards = [one for one in modules if one.sharding_strategy != ShardingStrategy.NO_SHARD]
    sharded: set[int] = set()
    for one in shards:
        flat = one._handle.flat_param if one._handle is not None else None
        if flat is not None:  # with use_orig_params, the module has views of it
            sharded |= {id(param) for param in (flat, *(flat._params or ()))}
    if shards:
        for name, param in model.named_parameters():
            if param.requires_grad and id(param) not in sharded:
                raise ValueError(
                    f"model: expected FSDP1 to shard all parameters, but {name} is whole on each "
                    "rank, and norms would count it once for each: step such parameters by "
                    "another optimizer"
                )
    return [one.process_group for one in shards]
