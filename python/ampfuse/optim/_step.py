"""One step of an optimizer: lists, signals, clipping, kernels.

Code that torch.compile traces reads the lists in another way, see `_traced`.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampfuse._graphs import eager_only, groups_of, is_capturing, traced_as
from ampfuse.gradients.devices import move_to
from ampfuse.gradients.mistakes import note_own_step
from ampfuse.gradients.signals import Signals
from ampfuse.optim import options
from ampfuse.optim._averaged import refuse_averaged
from ampfuse.optim._clips import grad_norm_tensor, group_clips
from ampfuse.optim._columns import Columns, describe_parameter
from ampfuse.optim._traced import traced_columns


def take_step(optimizer: Any) -> None:
    """Take a step with a scaler's signals, or with those that the optimizer has itself."""
    groups = groups_of(optimizer)
    refuse_averaged(optimizer, "step")
    limits = options.limits_of(groups, optimizer._own_options)
    if optimizer._is_in_zero and optimizer.process_group is None:
        refuse_limits_in_zero(optimizer, [*limits, optimizer.max_grad_norm])
    signals = Signals.read(optimizer)
    columns = read_columns(optimizer, groups, limits)
    clips, found_inf = group_clips(optimizer, groups, columns, limits, signals)
    for group, of_group, clip in zip(groups, columns, clips, strict=True):
        for of_device in of_group:
            clipping = clip.arguments(of_device.device) if clip else {}
            step_columns(optimizer, group, of_device, signals.grad_scale, found_inf, clipping)
            if of_device.copied:
                of_device.write_back()
    note_step(optimizer, columns, signals)


def refuse_limits_in_zero(optimizer: Any, limits: list[float | None]) -> None:
    """Raise for any finite limit, since the norm would cover only a part of the gradients."""
    if any(limit is not None and limit < float("inf") for limit in limits):
        raise ValueError(
            "max_grad_norm: in a ZeroRedundancyOptimizer each rank has only some of the "
            "parameters, and would clip by the norm of these. Pass "
            f"optimizer_class=functools.partial(ampfuse.{type(optimizer).__name__}, "
            "max_grad_norm=..., "
            "process_group=torch.distributed.group.WORLD), and no max_grad_norm beside it"
        )


@traced_as(traced_columns)
def read_columns(
    optimizer: Any, groups: list[dict[str, Any]], limits: list[float | None]
) -> list[list[Columns]]:
    """Return the columns of each group; create missing state, and check everything."""
    cache = optimizer._columns
    if cache.have_options_changed(groups, optimizer.max_grad_norm):
        options.check_groups(optimizer._rule, groups, optimizer.defaults)
        options.check_limit(optimizer.max_grad_norm)
        cache.note_options(groups, optimizer.max_grad_norm)
    optimizer._is_in_graphs = optimizer._is_in_graphs or is_capturing()
    columns: list[list[Columns]] = cache.read(groups, optimizer.state, optimizer._spare_masters)
    optimizer._written.adopt(columns)  # before the check, which counts as a write
    # A call of the op that raises writes nothing itself, but earlier calls would have stepped. So
    # several calls are checked by a skipped step, before any of them writes.
    if cache.may_be_refused(columns):
        for group, of_group in zip(groups, columns, strict=True):
            for of_device in of_group:
                skip = torch.ones((), dtype=torch.float32, device=of_device.device)
                step_columns(optimizer, group, of_device, None, skip, {})
        cache.note_check(columns)
    optimizer._grad_norm = grad_norm_tensor(optimizer._grad_norm, limits, columns)
    return columns


def step_columns(
    optimizer: Any,
    group: dict[str, Any],
    columns: Columns,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clipping: dict[str, Any],
) -> None:
    """Step the parameters of one group and device; `clipping`: the result of `Clip.arguments`."""
    op_options = columns.options
    if optimizer._unscales_in_place and grad_scale is not None:
        op_options = {**op_options, "write_back_grads": True}
    try:
        optimizer._rule.op(
            columns.params,
            columns.grads,
            *columns.moments,
            columns.state_steps,
            columns.masters,
            lr=columns.lr(group["lr"]),
            **op_options,
            grad_scale=move_to(grad_scale, columns.device),
            found_inf=move_to(found_inf, columns.device),
            adopt_params=True,
            **columns.extended(),
            **clipping,
        )
    except (TypeError, ValueError) as error:
        raise describe_parameter(error, columns, optimizer.param_groups) from None


@eager_only
def note_step(optimizer: Any, columns: list[list[Columns]], signals: Signals) -> None:
    """Record the step that was just taken."""
    if signals.grad_scale is None and signals.found_inf is None:
        note_own_step(one.params[0] for one in chain.from_iterable(columns))
    optimizer._columns.note_step()
    optimizer._written.note_step(columns)
