"""`plan`: how a training step fits into a budget of memory."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ampfuse._texts import bytes_of, size_text
from ampfuse.tools.memory import what_if
from ampfuse.tools.memory.account import recorded
from ampfuse.tools.memory.record import Record, is_within

MOMENT_DTYPES = {"AdamW": "state_dtype", "SGD": "momentum_dtype"}  # their options
ALLOWED = (
    what_if.MASTER_WEIGHTS.name,
    what_if.BFLOAT16_MOMENTS.name,
    what_if.CODED_MOMENTS.name,
    what_if.REMAINDERS.name,
    what_if.STOCHASTIC.name,
    "linear cross-entropy",
)


@dataclass(frozen=True)
class Plan:
    """Changes with which a training step fits into a budget, and the blocks to checkpoint."""

    budget: int
    peak: int
    """The peak after all changes, in bytes."""
    changes: list[str]
    """Names of changes, as in `Account.savings`, in the order in which they were chosen."""
    blocks: list[str]
    """Names of the modules whose activations are computed again in backward."""
    recomputed: float
    """The part of forward that is computed again, by floating-point operations."""
    hows: list[str]
    """How to make each of the changes."""
    optimizer: str
    """The class of ampfuse whose options `apply` returns: `"AdamW"`, `"SGD"`, or `""`."""

    @property
    def fits(self) -> bool:
        """True if the step fits into the budget."""
        return self.peak <= self.budget

    def __str__(self) -> str:
        """Return the plan as text."""
        verdict = "fits into" if self.fits else "does not fit into"
        lines = [f"a peak of {size_text(self.peak)} {verdict} {size_text(self.budget)}"]
        lines += [f"  {name}: {how}" for name, how in zip(self.changes, self.hows, strict=True)]
        if self.blocks:
            names = f"{self.blocks[0]} … {self.blocks[-1]}" if self.blocks[1:] else self.blocks[0]
            share = f"{self.recomputed:.0%} of forward is computed again"
            lines.append(f"  checkpoints: {len(self.blocks)} ({names}); {share}")
        elif not self.fits:
            lines.append("  no checkpoints: no part of the model can have one, or none saves")
        return "\n".join(lines)

    def apply(self, model: nn.Module) -> dict[str, Any]:
        """Checkpoint the blocks, cast the model if planned, and return options of the optimizer.

        Linear cross-entropy is the one change that is left to the program.

        Args:
            model: The model, which is changed in place.

        Returns:
            Arguments of `ampfuse.AdamW`, or of `ampfuse.SGD` if the program's optimizer is an SGD,
            by name.
        """
        for name in self.blocks:
            block = model.get_submodule(name)
            if getattr(block.forward, "func", None) is checkpoint:
                continue  # applied before
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        of_weights = (what_if.MASTER_WEIGHTS, what_if.REMAINDERS, what_if.STOCHASTIC)
        if {change.name for change in of_weights} & set(self.changes):
            model.to(torch.bfloat16)
        options: dict[str, Any] = {}
        if what_if.BFLOAT16_MOMENTS.name in self.changes:
            options[MOMENT_DTYPES[self.optimizer]] = torch.bfloat16
        if what_if.CODED_MOMENTS.name in self.changes:
            options[MOMENT_DTYPES[self.optimizer]] = "8bit"
        if what_if.REMAINDERS.name in self.changes:
            options["master_weights"] = "remainder"
        if what_if.STOCHASTIC.name in self.changes:
            options["master_weights"] = "stochastic"
        return options


def plan(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[], object],
    budget: int | str,
    *,
    allow: Sequence[str] = ("linear cross-entropy", "bfloat16 moments"),
    device: str = "cuda",
) -> Plan:
    """Return a plan with which a step's peak is at most `budget` bytes, if there is one.

    Changes that are allowed are made one after the other until the step fits. If it still does not
    fit, blocks are checkpointed, as few as possible, first those that save most for what they
    compute again. Model and optimizer stay as they are until `Plan.apply`.

    Args:
        model: The model, on the CPU.
        optimizer: The optimizer that `step` steps.
        step: A function that runs forward, backward and `optimizer.step()`; it is called twice.
        budget: Bytes, or a text like `"24GiB"`, or `"24GB"` for powers of 1000.
        allow: The changes that the plan may make, by their names in `Account.savings`:
            `"bfloat16 weights, masters"`, `"bfloat16 weights, remainders"`, `"bfloat16 weights,
            stochastic"`, `"bfloat16 moments"`, `"8-bit moments"` and `"linear cross-entropy"`.
        device: What the plan is about: `"cuda"`, or `"cpu"` for a program that trains on a CPU.

    Returns:
        The plan; its `fits` is False if the step does not fit after all changes.

    Raises:
        ValueError: `allow` has another name, or the model is refused as by `account`.

    Examples:
        >>> import torch, ampfuse.memory
        >>> from torch.nn import Linear, Sequential, Tanh
        >>> model = Sequential(
        ...     *(Sequential(Linear(64, 256), Tanh(), Linear(256, 64)) for _ in range(8))
        ... )
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step():
        ...     model(torch.zeros(4096, 64)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> made = ampfuse.memory.plan(model, optimizer, step, budget="32MiB")
        >>> made.fits, made.blocks
        (True, ['0', '1', '2', '3', '4'])
        >>> optimizer = ampfuse.SGD(model.parameters(), lr=0.1, **made.apply(model))
    """
    budget = bytes_of(budget)
    known = {change.name: change for change in what_if.CHANGES if change.name in ALLOWED}
    if isinstance(allow, str):
        raise TypeError(f"allow: expected a list of names, got the str {allow!r}")
    for name in allow:
        if name not in known:
            raise ValueError(f"allow: expected names of {list(known)}, got {name!r}")
    (record,) = recorded(model, optimizer, step, device)
    changes, hows = [], []
    for name in allow:
        if record.peak()[0] <= budget:
            break
        allocations = known[name].of(record)
        changed = record if allocations is None else replace(record, allocations=allocations)
        if changed.peak()[0] < record.peak()[0]:
            record = changed
            changes.append(name)
            hows.append(known[name].how_in(record))
    blocks = fewest_blocks(record, budget)
    peak = replace(record, allocations=what_if.checkpointed(record, blocks)).peak()[0]
    forward = sum(record.operations.values())
    again = sum(count for name, count in record.operations.items() if is_within(name, blocks))
    recomputed = again / forward if forward else 0.0
    return Plan(budget, peak, changes, blocks, recomputed, hows, record.replacement)


def fewest_blocks(record: Record, budget: int) -> list[str]:
    """Return the blocks to checkpoint; all of them if that helps, but is not enough."""

    def saved_per_operation(block: str) -> float:
        operations = sum(
            count for name, count in record.operations.items() if is_within(name, [block])
        )
        return sum(one.bytes for one in what_if.recomputed(record, block)) / max(operations, 1)

    # Equal blocks stay in their order: when the first ones are computed again, late in backward,
    # most other activations are freed already.
    order = sorted(record.blocks, key=saved_per_operation, reverse=True)

    def peak(count: int) -> int:
        allocations = what_if.checkpointed(record, order[:count])
        return replace(record, allocations=allocations).peak()[0]

    if peak(len(order)) >= peak(0):
        return []
    count = bisect_left(range(len(order)), True, key=lambda count: peak(count) <= budget)
    return [block for block in record.blocks if block in order[:count]]
