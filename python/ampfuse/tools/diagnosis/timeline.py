"""The times of all steps of a program, in bounded memory."""

from statistics import fmean, quantiles
from typing import Any

from ampfuse.tools.diagnosis.phases import PHASES

FIRST_STEPS = 3  # which allocate, compile and start workers, and are left out
LEAST_STEPS = 5  # from which means are computed
MOST_POINTS = 1024  # of a timeline; an even number


class Timeline:
    """The milliseconds of each phase, for each step or as means of stretches of steps."""

    def __init__(self) -> None:
        self.count = 0
        """The number of steps that were measured."""
        self.stretch = 1
        """The number of steps for each point; it doubles when there are too many points."""
        self.points: list[list[float]] = []
        """The number of a step, then the milliseconds of the phases."""
        self._open: list[list[float]] = []

    def add(self, step: int, seconds: dict[str, float]) -> None:
        """Add a step that took so many seconds in each phase."""
        self.count += 1
        if self.count <= FIRST_STEPS:
            return
        self._open.append([step, *(1e3 * seconds.get(phase, 0.0) for phase in PHASES)])
        if len(self._open) < self.stretch:
            return
        self.points.append(mean(self._open) if self.stretch > 1 else self._open[0])
        self._open.clear()
        if len(self.points) == MOST_POINTS:
            self.points = [mean(self.points[i : i + 2]) for i in range(0, MOST_POINTS, 2)]
            self.stretch *= 2

    def summary(self) -> dict[str, Any] | None:
        """Return means and all points, or None if there were too few steps."""
        if len(self.points) < LEAST_STEPS:
            return None
        steps, *columns = map(list, zip(*self.points, strict=True))
        phases = dict(zip(PHASES, columns, strict=True))
        whole = [sum(point[1:]) for point in self.points]
        return {
            "milliseconds": {phase: fmean(times) for phase, times in phases.items()},
            "quartiles": quantiles(whole, n=4, method="inclusive"),
            "timeline": {"step": steps, **phases},
        }


def mean(points: list[list[float]]) -> list[float]:
    """Return the mean of each column."""
    return [sum(column) / len(points) for column in zip(*points, strict=True)]
