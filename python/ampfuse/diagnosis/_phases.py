"""The phases of training steps, and how they follow from the times at which they begin and end."""

from collections import defaultdict
from collections.abc import Iterable
from time import perf_counter

from torch.optim import Optimizer

INPUT = "input"  # waiting for the next batch
FORWARD = "forward"  # all that comes between another phase and backward, so with the loss
BACKWARD = "backward"
OPTIMIZER = "optimizer"
SCALER = "scaler"
OTHER = "other"  # all else between two phases
PHASES = (INPUT, FORWARD, BACKWARD, OPTIMIZER, SCALER, OTHER)
EVALUATION = "evaluation"  # belongs to no step

# A time, the phase that begins or ends then, True if it begins, and for INPUT the id of the
# iterator that the program waits for, and True if the iterator is exhausted.
Note = tuple[float, str, bool, int, bool]


# The time between two notes: its phase, and its end.
Interval = tuple[str, float]


class NoteReader:
    """Reads notes in their order. Time between two phases is named after the second one.

    If the program takes two batches of one iterator without a backward between them, it evaluates,
    and the first batch belongs to no step. The last wait for an iterator belongs to none, either.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of each phase in the present step."""
        self._last = perf_counter()
        self._running: list[str] = []  # phases, the innermost last
        # For each iterator from which batches came since the last backward, the times before them.
        self._before: dict[int, dict[str, float]] = {}

    def read(self, notes: Iterable[Note]) -> list[Interval]:
        """Count the time until each note."""
        intervals, running, seconds = [], self._running, self.seconds
        for time, phase, begins, iterator, is_exhausted in notes:
            counted = running[-1] if running else self._between(phase, iterator)
            seconds[counted] += time - self._last
            self._last = time
            intervals.append((counted, time))
            if not begins:
                self._end(phase)
                if is_exhausted:
                    seconds = self._restore(self._before.pop(iterator, {}))
                continue
            if phase == BACKWARD:
                self._before.clear()
            elif phase == INPUT and not running:
                if iterator in self._before:
                    seconds = self._restore(self._before[iterator])
                else:
                    self._before[iterator] = dict(seconds)
            running.append(phase)
        return intervals

    def end_step(self) -> dict[str, float]:
        """Return the times of the step that has ended."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds

    def _between(self, following: str, iterator: int) -> str:
        if following == BACKWARD:
            return FORWARD
        return EVALUATION if following == INPUT and iterator in self._before else OTHER

    def _end(self, phase: str) -> None:
        """End a phase, and those inside of it that were not ended, since an error was raised."""
        running = self._running
        if phase == OPTIMIZER:  # the outermost, since earlier steps may have raised errors
            del running[running.index(phase) :]
        else:
            while running and running.pop() != phase:
                pass

    def _restore(self, seconds: dict[str, float]) -> defaultdict[str, float]:
        self.seconds = defaultdict(float, seconds)
        return self.seconds


class Listener:
    """Hears from a clock what a program does. Each method does nothing unless it is overridden."""

    is_live = False
    """True if `noted` is to be called in the next step."""

    def noted(self, phase: str, begins: bool) -> None:
        """A phase begins or ends now."""

    def read(self, intervals: list[Interval]) -> None:
        """The notes until the end of a step were read."""

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """This step has ended, after so many seconds in each phase. The first one is 1."""
