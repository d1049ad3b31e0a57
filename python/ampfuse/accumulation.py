"""`accumulate`: the gradients of a large batch from several small ones."""

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ampfuse._warning import warn_caller
from ampfuse.gradients.norms import device_of
from ampfuse.losses.options import SEEN_LOSSES, SeenLoss

IGNORED = -100  # targets that torch's cross-entropy leaves out by default


def accumulate(
    step: Callable[[Any, Any], Tensor],
    micro_batches: Iterable[Any],
    *,
    count: Callable[[Any], Tensor | float] | None = None,
    scaler: Any = None,
    model: Any = None,
    process_group: Any = None,
) -> Tensor:
    """Add up the gradients of micro-batches, and return the loss of the whole batch.

    The gradients are those of the mean loss over all targets of all micro-batches, up to rounding.
    The mean of the micro-batches' means would give more weight to targets of small micro-batches.

    Args:
        step: `step(micro_batch, denominator)` returns the loss of a micro-batch, which is a sum
            divided by `denominator`. ampfuse's losses take `denominator=`; with other losses,
            divide the sum yourself. A mean is wrong, even if it is divided by the denominator. A
            warning names a function that does not use its second argument, and a mean of torch's
            losses. Other means are not noticed. `step` neither scales the loss nor calls
            `backward`.
        micro_batches: At least one, on each rank.
        count: Returns the number, or the total weight, of the targets whose losses are added up in
            a micro-batch. By default a micro-batch is a pair of inputs and integer targets, of
            which those that are not -100 count.
        scaler: Scales the losses before `backward`. Unscaling, `scaler.step(optimizer)` and
            `scaler.update()` come once, after `accumulate`.
        model: A DistributedDataParallel, whose gradients are averaged once, in the last
            micro-batch. The batch is that of all ranks, and its loss is the mean of the ranks'
            results.
        process_group: All ranks over which gradients are averaged; by default those of `model`.
            Pass it for models of `fully_shard`: `mesh.get_group()` if their mesh has one dimension.
            Their gradients are averaged in each micro-batch, which takes no further memory.

    Returns:
        The sum of the micro-batches' losses, detached, not scaled, on their device.

    Raises:
        ValueError: There is no micro-batch, `step` has scaled a loss that `scaler` would scale, or
            a sharded model comes without `process_group`.
        TypeError: A micro-batch cannot be counted, or `step` returns something else than a loss.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 3)
        >>> inputs, targets = torch.randn(6, 4), torch.tensor([0, 2, 1, 1, -100, 2])
        >>> def step(part, denominator):
        ...     return ampfuse.cross_entropy(model(part[0]), part[1], denominator=denominator)
        >>> parts = list(zip(inputs.split(2), targets.split(2)))
        >>> loss = ampfuse.accumulate(step, parts)
        >>> torch.testing.assert_close(loss, ampfuse.cross_entropy(model(inputs), targets).detach())
    """
    if not callable(step):
        raise TypeError(
            f"accumulate: step: expected a function, got {kind_in_words(step)}: call "
            "accumulate(step, micro_batches)"
        )
    code = getattr(step, "__code__", None)  # None if it is not a plain function or method
    if code is not None and ignores_argument(code, 2 if inspect.ismethod(step) else 1):
        warn_caller(
            "accumulate: step does not use its second argument, the denominator. A result that is "
            "a mean would be added to other means: divide the micro-batch's sum by the denominator"
        )
    batches = list(micro_batches)
    if not batches:
        raise ValueError("accumulate: micro_batches: expected at least one, got none")
    denominator: Any = sum((count or targets_in)(micro_batch) for micro_batch in batches)
    group = group_of(model) if process_group is None else process_group
    if group is not None:
        denominator = mean_of_ranks(denominator, model, group)
    total: Tensor | None = None
    for number, micro_batch in enumerate(batches, 1):
        averages = number == len(batches) or not hasattr(model, "no_sync")
        with nullcontext() if averages else model.no_sync():
            loss, seen = _watched(step, micro_batch, denominator)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(f"accumulate: step: expected a loss, got {kind_in_words(loss)}")
            if not loss.requires_grad:
                raise ValueError(
                    "accumulate: step: expected a loss of parameters that are trained, got one "
                    "without gradients: return the loss itself, not loss.detach()"
                )
            if number == 1:
                check_first(loss, denominator, scaler, len(batches))
                check_seen(loss, seen, len(batches), counts_all=count is None)
            run_backward(loss if scaler is None else scaler.scale(loss))
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def run_backward(loss: Tensor) -> None:
    """Run the backward pass. Raise if `step` has run it before."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "accumulate: step: the graph of the loss was freed. If step calls backward(), leave it "
            "out: accumulate calls it. If step keeps a tensor of the last micro-batch, detach it"
        ) from error


def _watched(step: Any, micro_batch: Any, denominator: Any) -> tuple[Any, list[SeenLoss]]:
    """Call the step; return its result, and the losses of ampfuse that it has computed."""
    seen: list[SeenLoss] = []
    token = SEEN_LOSSES.set(seen)
    try:
        return step(micro_batch, denominator), seen
    finally:
        SEEN_LOSSES.reset(token)


def check_seen(loss: Tensor, seen: list[SeenLoss], micro_batches: int, counts_all: bool) -> None:
    """Look for mistakes in the use of ampfuse's losses in the first step.

    `counts_all`: targets are counted by `targets_in`.
    """
    node: Any = loss.grad_fn
    inner = node.next_functions[0][0] if type(node).__name__ == "DivBackward0" else None
    for one in seen:
        if one.node is None or (one.node is not node and one.node is not inner):
            continue
        is_divided = one.node is inner
        if one.reduction == "mean" and (is_divided or micro_batches > 1):
            warn_caller(
                "accumulate: step returns a mean of a micro-batch, which is added to other means: "
                "pass denominator=denominator to the loss, and do not divide it"
            )
        elif one.reduction == "divided" and is_divided:
            warn_caller(
                "accumulate: step divides a loss that the denominator has divided already: return "
                "the loss as it is"
            )
        elif one.reduction != "mean" and counts_all and one.ignore_index != IGNORED:
            warn_caller(
                f"accumulate: the loss ignores targets of {one.ignore_index}, but the denominator "
                f"counts all targets that are not {IGNORED}: pass for example "
                f"count=lambda part: (part[1] != {one.ignore_index}).sum()"
            )
        elif one.reduction != "mean" and counts_all and one.is_weighted:
            warn_caller(
                "accumulate: the loss has class weights, but the denominator is a number of "
                "targets: pass for example count=lambda part: weights[part[1]].sum()"
            )


def check_first(loss: Tensor, denominator: Any, scaler: Any, micro_batches: int) -> None:
    """Look for mistakes that the first loss shows: it was scaled, or is a mean."""
    node = loss.grad_fn
    factor = getattr(node, "_saved_other", None)  # None if the loss is no product or quotient
    if factor is not None and factor is getattr(scaler, "_scale", None):
        raise ValueError(
            "accumulate: step has scaled the loss, which scaler= would scale again: return the "
            "loss as it is"
        )
    is_quotient = type(node).__name__ == "DivBackward0"
    is_number = not isinstance(denominator, Tensor)
    is_divided = is_quotient and (factor is denominator or (is_number and factor == denominator))
    mean = node.next_functions[0][0] if node is not None and is_divided else node
    is_mean = getattr(mean, "_saved_reduction", None) == 1  # only torch's losses have it
    # A mean is right if there is one micro-batch, and a divided mean if each has one target.
    if is_mean and (denominator if is_divided else 1) != micro_batches:
        warn_caller(
            "accumulate: step returns a mean of a micro-batch, which is added to other means: "
            'compute the sum of its losses, by reduction="sum", and divide it by the denominator'
        )


@functools.cache
def ignores_argument(code: CodeType, index: int) -> bool:
    """Return True if a function's code never reads its argument of this index."""
    if index >= code.co_argcount:  # it has `*args`
        return False
    used = {str(instruction.argval) for instruction in dis.get_instructions(code)}
    return not any(re.search(rf"\b{code.co_varnames[index]}\b", name) for name in used)


def targets_in(micro_batch: Any) -> Tensor:
    """Return how many integer targets of a micro-batch (inputs, targets) are not -100."""
    if isinstance(micro_batch, list | tuple) and len(micro_batch) == 2:
        target = micro_batch[1]
        if isinstance(target, Tensor) and not target.is_floating_point():
            return (target.long() != IGNORED).sum()  # in uint8, -100 would be 156
    kind = kind_in_words(micro_batch)
    raise TypeError(
        "accumulate: expected micro-batches (inputs, integer targets), got "
        f"{kind}; pass count=, a function that returns how many targets a micro-batch has"
    )


def kind_in_words(value: Any) -> str:
    """Describe a value: its type, a tensor's dtype and shape, a list's items, a dict's keys."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} of shape {list(value.shape)}"
    if isinstance(value, list | tuple) and len(value) <= 4:
        return f"{type(value).__name__} of {', '.join(map(kind_in_words, value)) or 'nothing'}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(str, value))}"
    return type(value).__name__


def group_of(model: Any) -> Any:
    """Return a DistributedDataParallel's process group, or None; raise for sharded models."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if hasattr(model, "set_requires_gradient_sync") or hasattr(model, "process_group"):  # FSDP
        raise ValueError(
            "accumulate: model: pass process_group= for a sharded model, the group of all ranks "
            "over which its gradients are averaged: mesh.get_group() if the mesh has one dimension"
        )
    return None


def mean_of_ranks(count: Tensor | float, model: Any, group: Any) -> Tensor:
    """Return the mean of the ranks' counts. Their gradients are averaged, too, so it is exact."""
    device = count.device if isinstance(count, Tensor) else torch.device("cpu")
    if model is not None:
        device = next(model.parameters()).device
    elif device.type == "cpu" and device not in group._device_types:  # as with NCCL
        device = device_of([], group)
    total = torch.as_tensor(count, dtype=torch.float64).to(device, copy=True)
    torch.distributed.all_reduce(total, group=group)
    return total / torch.distributed.get_world_size(group)
