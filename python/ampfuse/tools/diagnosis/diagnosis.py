"""`Diagnosis`: measures a program while it trains, and says what limits it."""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse._graphs import compiled_graphs
from ampfuse._nested import params_of
from ampfuse.gradients.shards import is_distributed
from ampfuse.patching import losses
from ampfuse.tools.diagnosis import advice
from ampfuse.tools.diagnosis.autocasts import Autocasts
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.divergence import Divergence
from ampfuse.tools.diagnosis.gpu_times import GpuTimes
from ampfuse.tools.diagnosis.habits import Habits, WideLogits
from ampfuse.tools.diagnosis.lines import LineSampler, merge
from ampfuse.tools.diagnosis.phases import (
    EVALUATION,
    FIRST_STEPS,
    LEAST_STEPS,
    PHASES,
    Interval,
    Listener,
)
from ampfuse.tools.diagnosis.scalers import ScalerRecorder
from ampfuse.tools.hooks import replace
from ampfuse.tools.memory.monitor import Monitor

LINES_SHOWN = 20


class Diagnosis(Listener):
    """Measures a program until it is stopped. The program must run in the thread that made it.

    `notify` gets a hint at once that should not wait for the end of the program.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.habits = Habits()
        self.logits = WideLogits()
        self.gpu = GpuTimes()
        self.lines = LineSampler()
        self.monitor = Monitor()
        self._dtype: torch.dtype | None = None  # of the first weight
        self._times: list[tuple[int, dict[str, float]]] = []  # of the steps that were measured
        self._was_looking = False
        self._exits = ExitStack()
        self._exits.callback(self.monitor.stop_looking)
        self.divergence = Divergence(self._exits, notify)
        self.clock = StepClock(self._exits, self, self.habits, self.gpu, self.divergence)
        self.autocasts = Autocasts(self._exits)
        self.scalers = ScalerRecorder(self._exits)
        replace(self._exits, losses.USAGE, "on_input", self.logits)
        self._exits.callback(self.lines.stop)

    def read(self, intervals: list[Interval]) -> None:
        """Count the lines of a step."""
        if self._is_looking():
            self.lines.drop()
        else:
            self.lines.read(intervals)

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Note the times of a step, and the memory after it."""
        if self._dtype is None:
            param = next(iter(params_of(optimizer)), None)
            self._dtype = None if param is None else param.dtype
        if not seconds:
            self.lines.stop()
        elif not self._is_looking():
            self._times.append((step, seconds))
            if len(self._times) == FIRST_STEPS:
                self.lines.forget()
        self._was_looking = self.monitor.is_looking
        # A look for leaks runs compiled functions without the compiler, and so with other random
        # numbers. Processes of a group have to do the same.
        self.monitor.end_step(optimizer, may_look=not (compiled_graphs() or is_distributed()))

    def _is_looking(self) -> bool:
        """Return True in steps that record allocations and in the step after: both take long."""
        return self._was_looking or self.monitor.is_looking

    def stop(self) -> None:
        """Stop measuring."""
        self._exits.close()

    def steps(self) -> dict[str, Any] | None:
        """Return the times of steps, or None if there were too few steps."""
        times = self._times[FIRST_STEPS:]
        if len(times) < LEAST_STEPS:
            return None
        phases = {phase: [1e3 * one.get(phase, 0.0) for _, one in times] for phase in PHASES}
        whole = [sum(step) for step in zip(*phases.values(), strict=True)]
        spread = {name: spread_of(ms) for name, ms in {"a step": whole, **phases}.items()}
        lines = [
            {"phase": line.phase, "where": where, "text": text, "share": line.share}
            for line in merge(self.lines.lines())[:LINES_SHOWN]
            for where, text, _ in [line.place]
        ]
        return {
            "count": self.clock.steps,
            "measured": len(self._times),
            "milliseconds": {phase: fmean(values) for phase, values in phases.items()},
            "evaluation": fmean(one.get(EVALUATION, 0.0) * 1e3 for _, one in times),
            "evaluated": sum(EVALUATION in one for _, one in times),
            "median": median(whole),
            "spread": spread,
            "timeline": {"step": [step for step, _ in times], **phases},
            "gpu_milliseconds": self.gpu.milliseconds(),
            "lines": lines,
        }

    def autocast(self) -> str | None:
        """Return why autocast has changed nothing, or None if it has or is not used."""
        return None if self._dtype is None else self.autocasts.describe(self._dtype)

    def memory(self) -> dict[str, Any] | None:
        """Return the memory after each step, in bytes; None without steps."""
        if not self.monitor.samples:
            return None
        steps, host, gpu = map(list, zip(*self.monitor.samples, strict=True))
        return {
            "growth": self.monitor.growth(),
            "suspects": [one._asdict() for one in self.monitor.suspects],
            **{"step": steps, "host": host, "gpu": gpu},
        }

    def hints(self, has_scaler: bool) -> list[str]:
        """Return sentences about what to change. `has_scaler`: the program may have a scaler."""
        found = [] if self.divergence.hint is None else [self.divergence.hint]
        if (steps := self.steps()) is not None:
            found += advice.hints(steps, self.clock.loaders, self.lines.lines())
        found += advice.explain_gpu(self.gpu)
        found += advice.explain_habits(self.habits, self.clock.steps)
        found += advice.explain_logits(self.logits)
        if self.clock.steps:
            found += self.autocasts.explain_float16(has_scaler)
        found += advice.explain_memory(self.monitor)
        if self.clock.error is not None:
            found.append(f"Measuring has ended by an error of ampfuse: {self.clock.error!r}.")
        return found


def spread_of(times: list[float]) -> list[float]:
    """Return the range of the usual times: 5 % are below, and 25 % above it.

    Other work of the machine makes steps slower, but none makes them faster.
    """
    cuts = quantiles(times, n=20, method="inclusive")
    return [cuts[0], cuts[14]]
