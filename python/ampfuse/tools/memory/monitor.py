"""`Monitor`: whether the memory of a program grows from step to step, and what makes it grow."""

import gc
import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampfuse._graphs import eager_only, uses_gpu
from ampfuse._nested import params_of, states_of
from ampfuse._texts import size_text
from ampfuse.tools.hooks import FirstOptimizer, only_measures
from ampfuse.tools.memory.growth import Look, Suspect

WINDOW = 20  # growth is computed after so many steps, and later more rarely
POINTS = 24  # most samples that growth is computed from, evenly over the second half of all
KEPT = 2**14  # samples; a longer list would itself be memory that grows
LEAST_SPACING = 0.02  # seconds between two samples; one takes up to 50 µs
LEAST_GROWTH = 2**20  # bytes over these steps; less is noise
LEAST_STEADY = 0.9  # of all pairs of steps, the part in which the later one must have more memory


class Sample(NamedTuple):
    """The memory after a step, in bytes."""

    step: int
    host: int
    """The physical memory of the process."""
    allocated: int
    """The memory of torch's tensors on the GPU."""


class Monitor:
    """Finds out whether the memory of a program grows from step to step, and why.

    Steps are those of the first optimizer, outside of compiled functions. The memory of the process
    and of its GPU is read after steps, at most every 20 ms. If it grows, the allocations of two
    steps are recorded, and `suspects` names the lines and containers that hold the memory. The host
    does not wait for the GPU.

    Examples:
        >>> import torch, ampfuse.memory
        >>> param = torch.nn.Parameter(torch.zeros(1000))
        >>> optimizer = torch.optim.SGD([param], lr=0.1)
        >>> with ampfuse.memory.Monitor() as monitor:
        ...     for _ in range(3):
        ...         param.sum().backward()
        ...         optimizer.step()
        >>> monitor.steps, monitor.growth() is None
        (3, True)
    """

    def __init__(self) -> None:
        self.steps = 0
        """The number of steps so far."""
        self.samples: list[Sample] = []
        """The memory after steps. If there are many, only every second, fourth, … older one."""
        self.suspects: list[Suspect] = []
        """The lines and containers that hold the memory that grows."""
        self._has_looked = False
        self._look: Look | None = None
        self._next_sample = 0.0
        self._next_test = WINDOW  # for growth, after so many steps
        self._first = FirstOptimizer()

    def __enter__(self) -> "Monitor":
        """Begin to follow the steps of this thread."""
        self._thread = threading.get_ident()
        self._handle = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._handle.remove()
        self.stop_looking()

    @only_measures
    @eager_only
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._first.matches(optimizer) and threading.get_ident() == self._thread:
            self.end_step(optimizer)

    @property
    def is_looking(self) -> bool:
        """True while the allocations of steps are recorded."""
        return self._look is not None

    def end_step(self, optimizer: Optimizer, may_look: bool = True) -> None:
        """Sample after a step, and look for leaks: a `with` statement makes these calls itself.

        Args:
            optimizer: The optimizer that has stepped.
            may_look: Whether allocations may be recorded now.
        """
        self.steps += 1
        now = time.perf_counter()
        if now >= self._next_sample or len(self.samples) < WINDOW:
            self._next_sample = now + LEAST_SPACING
            if len(self.samples) >= KEPT:
                del self.samples[1:-1:2]
            allocated = torch.cuda.memory_allocated() if uses_gpu() else 0
            self.samples.append(Sample(self.steps, host_memory(), allocated))
        if self._look is not None:
            if self._look.end_step():
                params = params_of(optimizer)
                grads = [param.grad for param in params]
                self.suspects = self._look.suspects([params, grads, states_of(optimizer)])
                self._look = None
                self._has_looked = True
        elif may_look and not self._has_looked and self.steps >= self._next_test:
            self._next_test = self.steps + max(WINDOW, self.steps // 4)
            if self.growth() is not None and Look.may_begin():
                gc.collect()
                self._look = Look()

    def stop_looking(self) -> None:
        """End the recording of allocations, if there is one."""
        if self._look is not None:
            self._look.stop()

    def growth(self) -> float | None:
        """Return the bytes by which memory grows per step, or None if it does not grow."""
        if len(self.samples) < WINDOW:
            return None
        half = self.samples[len(self.samples) // 2 :]
        steps, *sizes = zip(*half[:: -(-len(half) // POINTS)], strict=True)
        slopes = [slope(steps, of_device) for of_device in sizes]
        return max((value for value in slopes if value is not None), default=None)

    def __str__(self) -> str:
        """Return growth and suspects as text."""
        growth = self.growth()
        if len(self.samples) < WINDOW:
            return f"{self.steps} steps are too few to tell whether memory grows"
        if growth is None:
            return f"no growth over {self.steps} steps"
        suspects = [f"  {one}" for one in self.suspects]
        return "\n".join([f"memory grows by {size_text(growth)} a step", *suspects])


def host_memory() -> int:
    """Return the physical memory of this process; 0 if it cannot be read."""
    # Pages of files, for example of a dataset that is mapped into memory, can be dropped.
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:  # the process may have reached its limit of open files
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def slope(steps: tuple[int, ...], sizes: tuple[int, ...]) -> float | None:
    """Return the median growth per step, or None if the numbers do not grow steadily."""
    pairs = [(i, j) for j in range(len(sizes)) for i in range(j)]
    slopes = [(sizes[j] - sizes[i]) / (steps[j] - steps[i]) for i, j in pairs]
    steady = sum(value > 0 for value in slopes) / len(slopes)
    growth = median(slopes)
    is_steady = steady > LEAST_STEADY and growth * (steps[-1] - steps[0]) >= LEAST_GROWTH
    return growth if is_steady else None
