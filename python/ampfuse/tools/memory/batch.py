"""`largest_batch`: the largest batch that fits, and how to accumulate to a larger one."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.optim import Optimizer

from ampfuse._texts import bytes_of
from ampfuse.tools.memory.account import recorded
from ampfuse.tools.memory.restoring import unchanged

TRIALS = 2
MOST = 2**20  # samples; a step whose memory allows for more does not depend on the batch
# On a GPU, torch cannot use all memory: free parts may be too small for a large tensor.
USABLE = 0.95


@dataclass(frozen=True)
class BatchSize:
    """The largest batch that fits, and micro-batches of at most this size."""

    largest: int
    """The number of samples that fit."""
    batch: int
    """The number of samples in each micro-batch."""
    accumulation: int
    """The number of micro-batches in a step; the last one may be smaller."""


def largest_batch(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[int], object],
    *,
    memory: int | str | None = None,
    effective: int | None = None,
    process_group: Any = None,
    device: str = "cuda",
) -> BatchSize:
    """Return the largest batch with which `step(batch)` fits into memory.

    If the model is on a GPU, steps run there: with 1, 2, 4, … samples, until they take half of the
    memory, and then at most twice with the number that is predicted from these. Running out of
    memory ends a trial, not the program. Model and optimizer are restored. If the model is on the
    CPU, accounts take the place of steps (see `account`).

    `ampfuse.accumulate` gives micro-batches the gradients of the whole batch.

    Args:
        model: The model. Call this before it is wrapped for several GPUs.
        optimizer: The optimizer that `step` steps.
        step: A function that makes a training step with so many samples. It must work with one.
        memory: Bytes that may be used, also as a text like `"24GiB"`; needed if the model is on the
            CPU, otherwise by default those of the GPU.
        effective: Number of samples of a whole step, which are divided into micro-batches.
        process_group: Ranks that get the same answer, or None.
        device: What accounts are about, as in `account`.

    Returns:
        The largest number of samples, and how to divide `effective`.

    Raises:
        ValueError: `memory` is needed, `effective` is below 1, the model has no parameters, or
            memory does not depend on the batch.
        torch.OutOfMemoryError: A step with one sample does not fit.

    Examples:
        >>> import torch, ampfuse.memory
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch):
        ...     model(torch.zeros(batch, 64)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> ampfuse.memory.largest_batch(model, optimizer, step, memory="64MiB", effective=10_000)
        BatchSize(largest=7912, batch=5000, accumulation=2)
    """
    if effective is not None and effective < 1:
        raise ValueError(f"effective: expected at least 1, got {effective}")
    parameter = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    if parameter is None:
        raise ValueError(f"model: expected a module with parameters, got {type(model).__name__}")
    model_device = parameter.device
    if model_device.type == "cpu":
        if memory is None:
            raise ValueError("memory: expected bytes, since the model is on the CPU")

        def accounted(batch: int) -> int:
            (record,) = recorded(model, optimizer, lambda: step(batch), device)
            return record.peak()[0]

        largest = search(accounted, bytes_of(memory))
    else:
        if memory is None:
            free, _ = torch.cuda.mem_get_info(model_device)
            memory = int(USABLE * (free + torch.cuda.memory_reserved(model_device)))
        measure = partial(measured, step, optimizer, model_device)
        with unchanged(model, optimizer):
            largest = search(measure, bytes_of(memory), TRIALS)
    if process_group is not None:
        smallest = torch.tensor(largest, device=model_device)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, process_group)
        largest = int(smallest.item())
    if largest >= MOST:
        raise ValueError(
            f"step: expected memory that grows with the batch, but {MOST:,} samples fit"
        )
    if largest == 0:
        raise torch.OutOfMemoryError("largest_batch: a step with one sample does not fit")
    if effective is None:
        return BatchSize(largest, largest, 1)
    count = -(-effective // largest)
    return BatchSize(largest, -(-effective // count), count)


def search(
    measure: Callable[[int], int | None],
    room: int,
    trials: int = MOST,
    peaks: dict[int, int] | None = None,
    most: int = MOST,
) -> int:
    """Return the largest batch that fits, or with few trials one that is nearly as large, or 0.

    `measure(batch)` returns the peak of a step, or None if it runs out of memory. Batches are
    doubled until a step takes half of the room: twice the batch takes at most twice as much. Then
    each guess lies on the line through two peaks. `peaks`: those of known batches, which may be
    empty; others are added. `most`: the largest batch that there can be.
    """
    peaks = {} if peaks is None else peaks

    def fits(batch: int) -> bool:
        peak = measure(batch)
        if peak is not None:
            peaks[batch] = peak
        return peak is not None and peak <= room

    # The largest batch that fits, and the smallest that does not.
    low = max((batch for batch, peak in peaks.items() if peak <= room), default=0)
    high = min((batch for batch, peak in peaks.items() if peak > room), default=None)
    while high is None and low < most:
        if low > 0 and peaks[low] > room // 2 and not _is_flat(peaks, low):
            break
        batch = min(2 * low or 1, most)
        if fits(batch):
            low = batch
        else:
            high = batch
    for _ in range(trials):
        if low >= most or (high is not None and high - low <= 1):
            break
        guess = min(max(_predicted(peaks, room), low + 1), most)
        if high is not None:
            nearest = high - 1 if high in peaks else low + max(1, (high - low) * 5 // 6)
            guess = min(guess, nearest)
        if fits(guess):
            low = guess
        else:
            high = guess
    return low


def _is_flat(peaks: dict[int, int], batch: int) -> bool:
    """Return True if the optimizer's step decides the peak: activations are smaller so far."""
    return batch > 1 and peaks[batch] < 1.01 * peaks.get(batch // 2, peaks[batch])


def _predicted(peaks: dict[int, int], room: int) -> int:
    """Return the batch at which the line through two peaks reaches the room.

    One peak is below the room and one above it, if possible.
    """
    below = [batch for batch, peak in peaks.items() if peak <= room]
    above = [batch for batch, peak in peaks.items() if peak > room]
    nearest = sorted(below)[-2:] if not above else [*sorted(below)[-1:], min(above)]
    if len(nearest) < 2:
        return 0
    first, last = nearest
    per_sample = (peaks[last] - peaks[first]) / (last - first)
    return int(first + (room - peaks[first]) / per_sample) if per_sample > 0 else 2 * last


def measured(
    step: Callable[[int], object], optimizer: Optimizer, gpu: torch.device, batch: int
) -> int | None:
    """Return the peak of a step that runs on a GPU, or None if it runs out of memory."""
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(gpu)
    try:
        step(batch)
        torch.cuda.synchronize(gpu)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(gpu)
