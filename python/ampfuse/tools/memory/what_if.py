"""The memory of a training step after a change of the program, computed from its record.

A change turns the allocations of a record into those that the changed program would make.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch

from ampfuse import _C
from ampfuse.tools.memory.record import BACKWARD, FORWARD, Allocation, Kind, Record, is_within

GPUS = 8  # over which the model is sharded in one of the changes
SHARDED = (Kind.PARAMETERS, Kind.MASTERS, Kind.GRADIENTS, Kind.MOMENTS, Kind.AVERAGES)
# Operators with a result of the logits' shape, by which the logits are found.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::mkldnn_linear")
LOSSES = ("aten::_log_softmax", "ampfuse::cross_entropy_forward", "ampfuse::cross_entropy")

# Arguments for moments in bfloat16, by the optimizer.
MOMENT_OPTIONS = {
    "AdamW": "state_dtype=torch.bfloat16, betas=(0.9, 0.95)",
    "SGD": "momentum_dtype=torch.bfloat16",
}
CODE_OPTIONS = {"AdamW": 'state_dtype="8bit"', "SGD": 'momentum_dtype="8bit"'}


@dataclass(frozen=True)
class Change:
    """A change of a program, and how to make it."""

    name: str
    how: str
    """The text about it. `{optimizer}`, `{moments}` and `{codes}` depend on the program."""
    of: Callable[[Record], list[Allocation] | None]
    """Returns the allocations after the change, or None if it does not concern the program."""

    def how_in(self, record: Record) -> str:
        """Return how the program of a record makes the change."""
        moments = MOMENT_OPTIONS.get(record.replacement, "")
        codes = CODE_OPTIONS.get(record.replacement, "")
        return self.how.format(optimizer=record.replacement, moments=moments, codes=codes)


def bfloat16_weights(record: Record, master_bytes: int) -> list[Allocation] | None:
    """Return the allocations with a bfloat16 model, and masters of 4, 2 or 0 bytes per weight."""
    weights = [one for one in record.allocations if _is_float32(one, Kind.PARAMETERS)]
    if not (weights and record.replacement):
        return None
    masters = [
        replace(one, kind=Kind.MASTERS, bytes=one.shape.numel() * master_bytes)
        for one in weights
        if one.is_trained and master_bytes > 0
    ]
    return masters + [
        _halve(one) if _is_float32(one, Kind.PARAMETERS, Kind.GRADIENTS, "") else one
        for one in record.allocations
        if one.kind not in (Kind.COPIES, Kind.MASTERS)
    ]


def bfloat16_moments(record: Record) -> list[Allocation] | None:
    """Return the allocations with an optimizer that keeps its moments in bfloat16."""
    has_moments = any(_is_float32(one, Kind.MOMENTS) for one in record.allocations)
    if not (has_moments and record.replacement):
        return None
    return [_halve(one) if _is_float32(one, Kind.MOMENTS) else one for one in record.allocations]


def coded_moments(record: Record) -> list[Allocation] | None:
    """Return the allocations with an optimizer that keeps its moments in 8 bits.

    It refuses a third moment, and moments that are float64 or complex.
    """
    moments = [one for one in record.allocations if one.kind == Kind.MOMENTS]
    if not record.replacement or any(one.dtype == torch.int8 for one in moments):
        return None
    trained = [one for one in record.allocations if one.is_trained]
    is_refused = any(one.dtype == torch.float64 or one.dtype.is_complex for one in trained)
    if is_refused or _elements(moments) > 2 * _elements(trained):
        return None
    numbers = (torch.float32, torch.bfloat16)
    changed = {id(one) for one in moments if one.dtype in numbers and one.shape.numel() > 1}
    if not changed:
        return None
    return [_code(one) if id(one) in changed else one for one in record.allocations]


def _elements(allocations: list[Allocation]) -> int:
    """Return the number of elements, without those of 0-dim tensors such as counters of steps."""
    return sum(one.shape.numel() for one in allocations if len(one.shape) > 0)


def drop_logits(record: Record) -> list[Allocation] | None:
    """Return the allocations with linear cross-entropy, which keeps no logits."""
    losses = [one for one in record.allocations if one.operator in LOSSES and len(one.shape) == 2]
    classes = max((one.shape[-1] for one in losses), default=0)
    heads = [
        one
        for one in record.allocations
        if one.kind == Kind.PARAMETERS and len(one.shape) == 2 and one.shape[0] == classes
    ]
    of_shape = [
        one
        for one in sorted(record.allocations, key=lambda one: one.born)
        if one.kind == "" and one.shape[-1:] == (classes,)
    ]
    gone: set[int] = set()
    new = []
    for loss in (one for one in losses if one.shape[-1] == classes):
        # The last product before the loss makes the logits. Gradients of other layers that have as
        # many features as there are classes begin with backward's first product.
        products = [one for one in of_shape if one.operator in PRODUCTS and one.born <= loss.born]
        if not (products and heads):
            return None
        first = products[-1]
        end = min(
            (
                one.born
                for one in record.allocations
                if one.phase == BACKWARD and one.operator in PRODUCTS and one.born > loss.born
            ),
            default=record.end,
        )
        gone |= {id(one) for one in of_shape if first.born <= one.born < end}
        new += _linear_loss(record, first, heads[-1])
    return [one for one in record.allocations if id(one) not in gone] + new if new else None


def _linear_loss(record: Record, logits: Allocation, head: Allocation) -> list[Allocation]:
    """Return the allocations of a linear cross-entropy in place of these logits."""
    rows = prod(logits.shape[:-1])
    size = _C.linear_cross_entropy_workspace(
        torch.empty(rows, head.shape[1], dtype=logits.dtype, device="meta"),
        torch.empty(head.shape, dtype=head.dtype, device="meta"),
        dtype=logits.dtype,
        logits_dtype=logits.dtype if record.for_gpu else torch.float32,
        weight_grad_dtype=head.dtype,
        chunk_rows=None,
        chunk_classes=None,
        with_gradient=True,
        on_gpu=record.for_gpu,
    )
    born = logits.born
    workspace = Allocation(size, logits.shape, logits.dtype, born, born + 1, kind=Kind.LOSS)
    # The weight's gradient is computed in forward, and is an ordinary gradient from backward on.
    gradient = replace(head, kind=Kind.GRADIENTS, born=born, died=record.backward_after(born))
    return [workspace, gradient]


def checkpointed(record: Record, blocks: list[str]) -> list[Allocation]:
    """Return the allocations if these blocks compute their activations again in backward.

    Between its forward and its backward, a block keeps only its inputs.
    """
    result = []
    gone: set[int] = set()
    kept_until: dict[int, int] = {}  # the moments until which inputs are kept, by id
    for block in blocks:
        inside = recomputed(record, block)
        gone |= set(map(id, inside))
        # Each micro-batch has its own forward and backward.
        batches: dict[int | None, list[Allocation]] = {}
        for one in inside:
            batches.setdefault(record.backward_after(one.born), []).append(one)
        for batch in batches.values():
            forward_end = max(one.born for one in batch) + 1
            backward_begin = min(one.used or one.died or record.end for one in batch)
            for one in batch:
                result += [replace(one, died=forward_end), replace(one, born=backward_begin)]
            begin = min(one.born for one in batch)
            end = max(one.died or record.end for one in batch)
            for one in record.allocations:
                is_input = block in one.inputs_of and one.born < forward_end
                if is_input and one.died is not None and one.died > begin:
                    kept_until[id(one)] = max(kept_until.get(id(one), one.died), end)
    return [
        replace(one, died=kept_until.get(id(one), one.died))
        for one in record.allocations
        if id(one) not in gone
    ] + result


def recomputed(record: Record, block: str) -> list[Allocation]:
    """Return the activations that a checkpoint around a block computes again."""
    return [
        one
        for one in record.allocations
        if one.phase == FORWARD and is_within(one.module, [block])
        # The results of the block itself stay, and of blocks around it.
        if not one.output_of or one.output_of.startswith(f"{block}.")
        if one.kind in ("", Kind.COPIES) and record.is_saved(one)
    ]


def sharded(record: Record) -> list[Allocation] | None:
    """Return the allocations if each GPU has one part of the model and of its optimizer."""
    if not record.for_gpu:
        return None
    return [
        replace(one, bytes=-(-one.bytes // GPUS)) if one.kind in SHARDED else one
        for one in record.allocations
    ]


def all_changes(record: Record) -> list[Allocation] | None:
    """Return the allocations with REMAINDERS and OTHERS, or None if fewer than two apply."""
    changed = 0
    for change in (REMAINDERS, *OTHERS):
        allocations = change.of(record)
        if allocations is not None:
            changed += 1
            record = replace(record, allocations=allocations)
    return record.allocations if changed >= 2 else None


def _is_float32(one: Allocation, *kinds: str) -> bool:
    return one.kind in kinds and one.dtype == torch.float32 and one.shape.numel() > 1


def _halve(one: Allocation) -> Allocation:
    return replace(one, bytes=one.bytes // 2, dtype=torch.bfloat16)


def _code(one: Allocation) -> Allocation:
    """Return a moment in 8 bits: a code per element, and two bytes per group of 32."""
    count = one.shape.numel()
    return replace(one, bytes=count + 2 * -(-count // 32), dtype=torch.uint8)


MASTER_WEIGHTS = Change(
    "bfloat16 weights, masters",
    "model.to(torch.bfloat16), no autocast, ampfuse.{optimizer}",
    lambda record: bfloat16_weights(record, 4),
)
REMAINDERS = Change(
    "bfloat16 weights, remainders",
    'model.to(torch.bfloat16), no autocast, ampfuse.{optimizer}(..., master_weights="remainder")',
    lambda record: bfloat16_weights(record, 2),
)
STOCHASTIC = Change(
    "bfloat16 weights, stochastic",
    'model.to(torch.bfloat16), no autocast, ampfuse.{optimizer}(..., master_weights="stochastic")',
    lambda record: bfloat16_weights(record, 0),
)
CODED_MOMENTS = Change("8-bit moments", "ampfuse.{optimizer}(..., {codes})", coded_moments)
BFLOAT16_MOMENTS = Change(
    "bfloat16 moments", "ampfuse.{optimizer}(..., {moments})", bfloat16_moments
)
OTHERS = (
    BFLOAT16_MOMENTS,
    Change("linear cross-entropy", "ampfuse.linear_cross_entropy", drop_logits),
    Change(
        "checkpoints",
        "torch.utils.checkpoint around each block",
        lambda record: checkpointed(record, record.blocks) if record.blocks else None,
    ),
)
ALL = Change("all of these", "with remainders and bfloat16 moments", all_changes)
COMBINED = [change.name for change in (REMAINDERS, *OTHERS)]
CHANGES = (
    MASTER_WEIGHTS,
    REMAINDERS,
    STOCHASTIC,
    CODED_MOMENTS,
    *OTHERS,
    ALL,
    Change(f"sharded over {GPUS} GPUs", "torch.distributed.fsdp.fully_shard", sharded),
)
