"""`Diagnosis`: measures a program while it trains, and says what limits it."""

from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from ampfuse._graphs import compiled_graphs
from ampfuse.gradients.shards import is_distributed
from ampfuse.patching import losses
from ampfuse.tools.diagnosis import advice
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.gpu_times import GpuTimes
from ampfuse.tools.diagnosis.habits import Habits
from ampfuse.tools.diagnosis.lines import LineSampler, merged
from ampfuse.tools.diagnosis.logits import WideLogits
from ampfuse.tools.diagnosis.phases import Interval, Listener
from ampfuse.tools.diagnosis.timeline import FIRST_STEPS, Timeline
from ampfuse.tools.hooks import replace
from ampfuse.tools.memory.step_memory import StepMemory

LINES_SHOWN = 20


class CarefulMemory(StepMemory):
    """Does not record allocations where this could change the program's results.

    Compiled functions would run without the compiler, and with other random numbers. Processes of
    a group have to do the same.
    """

    def may_look(self) -> bool:
        """Return True if the allocations of two steps may be recorded."""
        return not (compiled_graphs() or is_distributed()) and super().may_look()


class Diagnosis(Listener):
    """Measures a program until it is stopped. The program must run in the thread that made it."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.habits = Habits()
        self.logits = WideLogits()
        self.gpu = GpuTimes()
        self.lines = LineSampler()
        self.growing = CarefulMemory()
        self._was_looking = False
        self._exits = ExitStack()
        self._exits.callback(self.growing.stop_looking)
        self.clock = StepClock(self._exits, self, self.habits, self.gpu)
        replace(self._exits, losses.USAGE, "on_input", self.logits)
        self._exits.callback(self.lines.stop)

    def read(self, intervals: list[Interval]) -> None:
        """Count the lines of a step."""
        if self._is_looking():
            self.lines.drop()
        else:
            self.lines.read(intervals)

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Note the times of a step."""
        if not self._is_looking():
            self.timeline.add(step, seconds)
            if self.timeline.count == FIRST_STEPS:
                self.lines.forget()
        self._was_looking = self.growing.is_looking
        self.growing.end_step(optimizer, step)

    @property
    def needs_next_step(self) -> bool:  # type: ignore[override]
        """True while allocations are recorded, which would make the steps of a pause slow."""
        return self.growing.is_looking

    def pauses(self, begins: bool) -> None:
        """Take no samples of lines in a pause."""
        self.lines.pause(begins)

    def _is_looking(self) -> bool:
        """Return True in steps that record allocations and in the step after: both take long."""
        return self._was_looking or self.growing.is_looking

    def stop(self) -> None:
        """Stop measuring."""
        self._exits.close()

    def steps(self) -> dict[str, Any] | None:
        """Return the times of steps, or None if there were too few steps."""
        summary = self._summary()
        if summary is None:
            return None
        lines = [
            {"phase": line.phase, "where": where, "text": text, "share": line.share}
            for line in merged(self.lines.lines())[:LINES_SHOWN]
            for where, text, _ in [line.place]
        ]
        return summary | {"gpu_milliseconds": self.gpu.milliseconds(), "lines": lines}

    def _summary(self) -> dict[str, Any] | None:
        summary = self.timeline.summary()
        if summary is None:
            return None
        return {"count": self.clock.steps, "measured": self.timeline.count, **summary}

    def memory(self) -> dict[str, Any] | None:
        """Return the memory after each step, in bytes; None without steps."""
        if not self.growing.ends:
            return None
        ends = self.growing.ends
        return {
            "growth": self.growing.growth(),
            "suspects": [one._asdict() for one in self.growing.suspects],
            "step": [end.step + 1 for end in ends],
            "host": [end.host for end in ends],
            "gpu": [end.allocated for end in ends],
        }

    def hints(self) -> list[str]:
        """Return sentences about what to change."""
        found: list[str] = []
        if (steps := self._summary()) is not None:
            found += advice.hints(steps, self.clock.loaders, self.lines.lines())
        found += advice.about_gpu(self.gpu)
        found += advice.about_habits(self.habits, self.timeline.count)
        found += advice.about_logits(self.logits)
        found += advice.about_memory(self.growing)
        if self.clock.error is not None:
            found.append(f"Measuring has ended by an error of ampfuse: {self.clock.error!r}.")
        return found
