"""`Monitor`: how much memory a program takes over time, and whether it grows."""

import csv
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._background import Background
from ampfuse._graphs import uses_gpu
from ampfuse._measuring import hook_steps, only_measures
from ampfuse._nested import params_of
from ampfuse._replacing import replace
from ampfuse._texts import size_text
from ampfuse.memory._growth import Look, Suspect, storages_of
from ampfuse.memory._process import gpu_process_memory, host_memory
from ampfuse.memory._record import BACKWARD, FORWARD, STEP

WARM_UP = 5  # steps that may allocate what stays: gradients, state, caches
WINDOW = 20  # growth is computed after so many steps, and later more rarely
POINTS = 24  # from this many samples of the last steps, evenly over the second half of all
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
    process: int
    """Memory of the whole process on all GPUs, if nvidia-ml-py is installed."""


class Monitor:
    """Samples the memory of the process and of its GPU while a program trains.

    >>> import torch, ampfuse.memory
    >>> param = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer = torch.optim.SGD([param], lr=0.1)
    >>> with ampfuse.memory.Monitor() as monitor:
    ...     for _ in range(3):
    ...         param.sum().backward()
    ...         optimizer.step()
    >>> monitor.steps, monitor.growth() is None
    (3, True)
    >>> monitor.write_csv("/tmp/memory.csv")

    Steps are those of the first optimizer, outside of compiled functions. Samples are taken by a
    thread every `interval` seconds, and after each step that takes 20 ms or more. If memory grows
    from step to step, the allocations of two steps are recorded, and `suspects` says which lines
    and containers hold the memory; this can be switched off with `find_leaks=False`. `writer`: a
    TensorBoard writer that gets the values after steps.

    It needs psutil except on Linux: `pip install ampfuse[tools]`.
    """

    def __init__(
        self, interval: float = 0.1, *, writer: Any = None, find_leaks: bool = True
    ) -> None:
        self.interval = interval
        self.steps = 0
        """The number of steps so far."""
        self.samples: list[Sample] = []
        """All samples, or every second, fourth, … of those that are older, if there are many."""
        self.ends: list[Sample] = []
        """The samples after steps: after each one that ends 20 ms after the last sample."""
        self.suspects: list[Suspect] = []
        self._writer = writer
        self._finds_leaks = find_leaks
        self._phase = FORWARD
        self._first: weakref.ref[Optimizer] | None = None
        self._look: Look | None = None
        self._next_test = WINDOW  # for growth, after so many steps
        self._host = host_memory()
        self._process: Callable[[], int] | None = None  # set when the program uses a GPU
        self._device = 0
        self._thread_of_program = threading.get_ident()
        self._start = time.perf_counter()
        self._exits = ExitStack()

    @property
    def is_looking(self) -> bool:
        """True while the allocations of steps are recorded."""
        return self._look is not None

    def __enter__(self) -> "Monitor":
        """Begin to sample."""
        self._start = time.perf_counter()
        self._thread_of_program = threading.get_ident()
        hook_steps(self._exits, self._before_step, self._after_step)
        replace(self._exits, torch.autograd, "backward", self._marked(torch.autograd.backward))
        self._background = Background(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._background.stop()
        self._exits.close()
        if self._look is not None:
            self._look.stop()

    def may_look(self) -> bool:
        """Return True if the allocations of two steps may be recorded now."""
        return Look.may_begin()

    def growth(self) -> float | None:
        """Return the bytes by which memory grows per step, or None if it does not grow."""
        ends = self.ends[max(WARM_UP, len(self.ends) // 2) :]
        if len(ends) < WINDOW // 2:
            return None
        ends = ends[:: -(-len(ends) // POINTS)]
        steps = [end.step for end in ends]
        found = [
            slope(steps, [end.host for end in ends]),
            slope(steps, [end.allocated for end in ends]),
        ]
        return max((value for value in found if value is not None), default=None)

    def peak(self) -> Sample:
        """Return the sample with most memory: on the GPU if the program uses one."""
        if not self.samples:
            raise ValueError("Monitor: there are no samples yet")
        return max(self.samples, key=lambda one: (one.allocated, one.host))

    def __str__(self) -> str:
        """Return peak, growth and suspects as text."""
        if not self.samples:
            return "no samples yet"
        peak = self.peak()
        size = peak.allocated or peak.host
        place = "GPU" if peak.allocated else "host"
        lines = [f"peak {size_text(size)} on the {place}, in step {peak.step}, {peak.phase}"]
        growth = self.growth()
        if self.steps < WARM_UP + WINDOW // 2:
            lines.append(f"{self.steps} steps are too few to tell whether memory grows")
        elif growth is None:
            lines.append(f"no growth over {self.steps} steps")
        else:
            lines.append(f"memory grows by {size_text(growth)} a step")
        for one in self.suspects:
            if one.bytes:
                place = f"  {one.where} {one.what}".rstrip()
                lines.append(f"{place}: {size_text(one.bytes)} a step")
            else:
                lines.append(f"  {one.where} has become a {one.what}")
        return "\n".join(lines)

    def write_csv(self, path: str | Path) -> None:
        """Write all samples."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Sample._fields)
            writer.writerows(self.samples)

    def plot(self, path: str | Path) -> None:
        """Draw memory over time, with a mark for each step. This needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds", ylabel="MiB", title="Memory")
        seconds = [one.seconds for one in self.samples]
        for name in ("host", "allocated", "reserved"):
            sizes = [getattr(one, name) / 2**20 for one in self.samples]
            if any(sizes):
                label = name if name == "host" else f"{name} on the GPU"
                axes.plot(seconds, sizes, label=label, linewidth=1)
        for end in self.ends:
            axes.axvline(end.seconds, color="#dddddd", linewidth=0.5, zorder=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(self.interval):
            keep(self.samples, self._sample())

    def _sample(self) -> Sample:
        allocated = reserved = process = 0
        if uses_gpu():
            if threading.get_ident() == self._thread_of_program:
                self._device = torch.cuda.current_device()  # each thread has its own
            if self._process is None:
                self._process = gpu_process_memory()
            allocated = torch.cuda.memory_allocated(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            process = self._process()
        seconds = time.perf_counter() - self._start
        host = self._host()
        return Sample(seconds, self.steps, self._phase, host, allocated, reserved, process)

    def _marked(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.autograd.backward` with a note that it is running."""

        @wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return backward(*args, **kwargs)
            before, self._phase = self._phase, BACKWARD
            try:
                return backward(*args, **kwargs)
            finally:
                self._phase = before

        return marked

    @only_measures
    def _before_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._phase = STEP

    @only_measures
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._phase = FORWARD
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer or threading.get_ident() != self._thread_of_program:
            return
        self._sample_end()
        self.steps += 1
        if self._look is not None:
            if self._look.end_step():
                self.suspects = self._look.suspects(storages_of(_kept(optimizer)))
                self._look = None
                self._finds_leaks = False
        elif self._is_suspicious() and self.may_look():
            gc.collect()
            self._look = Look()

    def _sample_end(self) -> None:
        """Take the sample of a step, unless steps are short."""
        if self.ends and time.perf_counter() - self._start < self.ends[-1].seconds + LEAST_SPACING:
            return
        sample = self._sample()
        keep(self.samples, sample)
        keep(self.ends, sample)
        if self._writer is not None:
            self._write(sample)

    def _is_suspicious(self) -> bool:
        if not self._finds_leaks or self.steps < self._next_test:
            return False
        self._next_test = self.steps + max(WINDOW, self.steps // 4)
        return self.growth() is not None

    def _write(self, sample: Sample) -> None:
        for name in ("host", "allocated", "reserved", "process"):
            if size := getattr(sample, name):
                self._writer.add_scalar(f"memory/{name}", size, sample.step)


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
    state = (value for entries in optimizer.state.values() for value in entries.values())
    grads = (param.grad for param in params)
    return [one for one in (*params, *grads, *state) if isinstance(one, Tensor)]
