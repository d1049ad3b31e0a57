"""`Monitor`: how much memory a program takes over time, and whether it grows."""

import csv
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse._graphs import eager_only
from ampfuse._texts import size_text
from ampfuse.tools.background import Background
from ampfuse.tools.hooks import hook_backward, hook_steps, only_measures
from ampfuse.tools.memory.record import BACKWARD, FORWARD, STEP
from ampfuse.tools.memory.step_memory import Sample, StepMemory, keep


class Monitor(StepMemory):
    """Samples the memory of the process and of its GPU while a program trains.

    Steps are those of the first optimizer, outside of compiled functions. A thread takes samples
    every `interval` seconds. Samples are also taken after steps, at most one every 20 ms. If memory
    grows from step to step, the allocations of two steps are recorded, and `suspects` names the
    lines and containers that hold the memory. The host does not wait for the GPU.

    Args:
        interval: Seconds between two samples.
        find_leaks: Record the allocations of two steps if memory grows.

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
        >>> monitor.write_csv("/tmp/memory.csv")
    """

    def __init__(self, interval: float = 0.1, *, find_leaks: bool = True) -> None:
        super().__init__(find_leaks=find_leaks)
        self.interval = interval
        self.samples: list[Sample] = []
        """All samples. If there are many, only every second, fourth, … of the older ones."""
        self._first: weakref.ref[Optimizer] | None = None
        self._device_of_program = 0
        self._thread_of_program = threading.get_ident()
        self._exits = ExitStack()

    def __enter__(self) -> "Monitor":
        """Begin to sample."""
        self._thread_of_program = threading.get_ident()
        hook_steps(self._exits, self._before_step, self._after_step)
        hook_backward(self._exits, self._marked)
        self._background = Background(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._background.stop()
        self._exits.close()
        self.stop_looking()

    def peak(self) -> Sample:
        """Return the sample with most memory: on the GPU if the program uses one.

        Raises:
            ValueError: There are no samples yet.
        """
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
        if not self._second_half():
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
        """Write all samples as a table with the fields of `Sample`.

        Args:
            path: The file, which is overwritten.
        """
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Sample._fields)
            writer.writerows(self.samples)

    def plot(self, path: str | Path) -> None:
        """Draw memory over time, with a mark for each step. This needs matplotlib.

        Args:
            path: The picture's file; its ending chooses the format.
        """
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
    @eager_only
    def _before_step(self, *_: Any) -> None:
        self._phase = STEP

    @only_measures
    @eager_only
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._phase = FORWARD
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer or threading.get_ident() != self._thread_of_program:
            return
        self.end_step(optimizer, self.steps + 1)

    def keep_end(self, sample: Sample) -> None:
        """Keep the sample after a step.

        Args:
            sample: The sample.
        """
        keep(self.samples, sample)
        super().keep_end(sample)

    def _device(self) -> int:
        """Return the GPU of the program: each thread has its own."""
        if threading.get_ident() == self._thread_of_program:
            self._device_of_program = super()._device()
        return self._device_of_program
