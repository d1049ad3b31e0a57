"""`StepMemory`: the memory of the process after each step, and what makes it grow."""

import gc
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._graphs import uses_gpu
from ampfuse._nested import params_of, states_of
from ampfuse.tools.memory.growth import Look, Suspect, storages_of
from ampfuse.tools.memory.process import host_memory
from ampfuse.tools.memory.record import FORWARD

WINDOW = 20  # growth is computed after so many steps, and later more rarely
POINTS = 24  # most samples that growth is computed from, evenly over the second half of all
KEPT = 2**14  # samples; a longer list would itself be memory that grows
LEAST_SPACING = 0.02  # seconds between the samples of two steps; one takes up to 50 µs
LEAST_GROWTH = 2**20  # bytes over these steps; less is noise
LEAST_STEADY = 0.9  # of all pairs of steps, the part in which the later one must have more memory


class Sample(NamedTuple):
    """The memory at one time, in bytes."""

    seconds: float
    step: int
    phase: str
    host: int
    """The physical memory of the process."""
    allocated: int
    """Memory of torch's tensors on the GPU."""
    reserved: int
    """Memory that torch has reserved on the GPU."""


class StepMemory:
    """Samples memory when `end_step` is called, at most every 20 ms.

    If memory grows from step to step, the allocations of two steps are recorded, and `suspects`
    says which lines and containers hold the memory.
    """

    def __init__(self, *, find_leaks: bool = True) -> None:
        self.steps = 0
        """The number of steps so far."""
        self.ends: list[Sample] = []
        """The samples after steps, or every second, fourth, … of those that are older."""
        self.suspects: list[Suspect] = []
        self._phase = FORWARD
        self._finds_leaks = find_leaks
        self._look: Look | None = None
        self._next_test = WINDOW  # for growth, after so many steps
        self._start = time.perf_counter()

    @property
    def is_looking(self) -> bool:
        """True while the allocations of steps are recorded."""
        return self._look is not None

    def may_look(self) -> bool:
        """Return True if the allocations of two steps may be recorded now."""
        return Look.may_begin()

    def _second_half(self) -> list[Sample]:
        """Return the second half of the samples, or nothing if it is too short for growth()."""
        ends = self.ends[len(self.ends) // 2 :]
        return ends if len(ends) >= WINDOW // 2 else []

    def growth(self) -> float | None:
        """Return the bytes by which memory grows per step, or None if it does not grow."""
        ends = self._second_half()
        if not ends:
            return None
        ends = ends[:: -(-len(ends) // POINTS)]
        steps = [end.step for end in ends]
        found = [
            slope(steps, [end.host for end in ends]),
            slope(steps, [end.allocated for end in ends]),
        ]
        return max((value for value in found if value is not None), default=None)

    def end_step(self, optimizer: Optimizer, steps: int) -> None:
        """Sample after a step of an optimizer, and look for leaks.

        Args:
            optimizer: The optimizer that has stepped.
            steps: The number of its steps so far.
        """
        self.steps = steps - 1
        seconds = time.perf_counter() - self._start
        if not self.ends or seconds >= self.ends[-1].seconds + LEAST_SPACING:
            self.keep_end(self._sample())
        self.steps = steps
        if self._look is not None:
            if self._look.end_step():
                self.suspects = self._look.suspects(storages_of(_kept(optimizer)))
                self._look = None
                self._finds_leaks = False
        elif self._is_suspicious() and self.may_look():
            gc.collect()
            self._look = Look()

    def keep_end(self, sample: Sample) -> None:
        """Keep the sample after a step.

        Args:
            sample: The sample.
        """
        keep(self.ends, sample)

    def stop_looking(self) -> None:
        """End the recording of allocations, if there is one."""
        if self._look is not None:
            self._look.stop()

    def _device(self) -> int:
        """Return the GPU of the program."""
        return torch.cuda.current_device()

    def _sample(self) -> Sample:
        allocated = reserved = 0
        if uses_gpu():
            device = self._device()
            allocated = torch.cuda.memory_allocated(device)
            reserved = torch.cuda.memory_reserved(device)
        seconds = time.perf_counter() - self._start
        return Sample(seconds, self.steps, self._phase, host_memory(), allocated, reserved)

    def _is_suspicious(self) -> bool:
        if not self._finds_leaks or self.steps < self._next_test:
            return False
        self._next_test = self.steps + max(WINDOW, self.steps // 4)
        return self.growth() is not None


def keep(samples: list[Sample], sample: Sample) -> None:
    """Append a sample. If there are many, drop every second one of those before."""
    if len(samples) >= KEPT:
        del samples[1:-1:2]
    samples.append(sample)


def slope(steps: list[int], sizes: list[int]) -> float | None:
    """Return the median growth per step, or None if the numbers do not grow steadily."""
    pairs = [(i, j) for j in range(len(sizes)) for i in range(j)]
    slopes = [(sizes[j] - sizes[i]) / (steps[j] - steps[i]) for i, j in pairs]
    steady = sum(value > 0 for value in slopes) / len(slopes)
    growth = median(slopes)
    is_steady = steady > LEAST_STEADY and growth * (steps[-1] - steps[0]) >= LEAST_GROWTH
    return growth if is_steady else None


def _kept(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that stay from step to step: parameters, gradients and state."""
    params = params_of(optimizer)
    state = (value for entries in states_of(optimizer) for value in entries.values())
    grads = (param.grad for param in params)
    return [one for one in (*params, *grads, *state) if isinstance(one, Tensor)]
