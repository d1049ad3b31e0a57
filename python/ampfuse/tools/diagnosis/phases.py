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
EVALUATION = "evaluation"  # beside the phases of a step

FIRST_STEPS = 3  # which allocate, compile and start workers, and are left out
LEAST_STEPS = 5  # from which means are computed

# A time, the phase that begins or ends then, True if it begins, its source, and True if an iterator
# is exhausted. The source is the id of an iterator, DataLoader or optimizer, or a call's number.
Note = tuple[float, str, bool, int, bool]

# The time between two notes: its phase, and its end.
Interval = tuple[str, float]


class NoteReader:
    """Reads notes in their order. Time between two phases is FORWARD before backward, else OTHER.

    If an iterator is exhausted without a backward since its first batch, or if `model.train()`
    follows `model.eval()` without a backward, the program has evaluated, which belongs to no phase
    of a step. Neither does the wait in which an iterator proves to be exhausted, which alone is no
    evaluation. But a program that calls `eval()` and `train()` in successive steps, without
    exhausting an iterator between them, makes its data or targets so, which is a part of the steps.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of each phase in the present step."""
        self.training: set[int] = set()
        """The ids of iterators from which batches came before a backward."""
        self._last = perf_counter()
        self._running: list[tuple[str, int]] = []  # phases, the innermost last
        # For each iterator from which batches came since the last backward: the times before its
        # first batch, and the number of intervals.
        self._before: dict[int, tuple[dict[str, float], int]] = {}
        # True if this step, or the one before it, has called eval() and train() without a loader.
        self._switches = self._has_switched = False

    def read(self, notes: Iterable[Note]) -> list[Interval]:
        """Count the time until each note."""
        intervals: list[Interval] = []
        running, seconds = self._running, self.seconds
        self._before = {iterator: (times, 0) for iterator, (times, _) in self._before.items()}
        for time, phase, begins, source, is_exhausted in notes:
            between = FORWARD if phase == BACKWARD else OTHER
            counted = running[-1][0] if running else between
            seconds[counted] += time - self._last
            self._last = time
            intervals.append((counted, time))
            if begins:
                if phase == BACKWARD:
                    self.training.update(self._before)
                    self._before.clear()
                elif phase in (INPUT, EVALUATION) and not running and source not in self._before:
                    self._before[source] = dict(seconds), len(intervals)
                if phase != EVALUATION:  # its parts have phases of their own until it has ended
                    running.append((phase, source))
                continue
            # Errors may have left phases inside of it, and the phase itself in an earlier step.
            if (phase, source) in running:
                del running[running.index((phase, source)) :]
            if is_exhausted and source in self._before:
                times, first = self._before.pop(source)
                if phase == EVALUATION and seconds[EVALUATION] == times.get(EVALUATION, 0.0):
                    self._switches = True
                    if self._has_switched:
                        continue
                evaluated = sum(seconds.values()) - sum(times.values())
                seconds = self.seconds = defaultdict(float, times)
                # Not if it is the last wait of a training loader alone.
                if phase == EVALUATION or len(intervals) > first + 1:
                    seconds[EVALUATION] += evaluated
                intervals[first:] = [(EVALUATION, end) for _, end in intervals[first:]]
        return intervals

    def end_step(self) -> dict[str, float]:
        """Return the times of the step that has ended."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        self._before.clear()
        self._has_switched, self._switches = self._switches, False
        return seconds


class Listener:
    """Hears from a clock what a program does. Each method does nothing unless it is overridden."""

    is_live = False
    """True if `noted` is to be called in the next step."""

    def noted(self, phase: str, begins: bool) -> None:
        """A phase begins or ends now."""

    def read(self, intervals: list[Interval]) -> None:
        """The notes until the end of a step were read."""

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """This step has ended, after so many seconds in each phase. The first one is 1.

        `seconds` is empty when enough steps are measured.
        """
