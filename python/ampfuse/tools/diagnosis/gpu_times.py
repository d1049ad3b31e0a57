"""Measures how long the GPU is busy with the phases of steps, and whether it waits for the host."""

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse._graphs import is_capturing, uses_gpu
from ampfuse.tools.diagnosis.phases import BACKWARD, FORWARD, OPTIMIZER, Interval, Listener

EVERY = 8  # steps; events take some microseconds each


class GpuTimes(Listener):
    """The GPU's time for each phase, in every eighth step: the time between two events."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that were measured."""
        self.phases = 0
        """Phases of these steps that give the GPU work."""
        self.idle = 0
        """Phases that ended when the GPU had no work left."""
        self._milliseconds: defaultdict[str, float] = defaultdict(float)
        self._count = 0
        self._stream: Any = None  # of all events
        self._events: list[tuple[Any, bool]] = []  # for each note; True: the GPU was idle then
        self._phases: list[str] = []  # that end with the events

    def noted(self, phase: str, begins: bool) -> None:
        """Record an event."""
        stream = None if is_capturing() else torch.cuda.current_stream()
        if not self.is_live or stream is None or stream != (self._stream or stream):
            self._stop()  # events can be compared only on one stream
            return
        self._stream = stream
        is_idle = stream.query()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events.append((event, is_idle))

    def read(self, intervals: list[Interval]) -> None:
        """Note the phases to which the events belong."""
        if self.is_live:
            self._phases += [phase for phase, _ in intervals]

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Begin or end to measure, and read the events when the GPU has come that far."""
        self._count += 1
        if is_capturing():
            self._stop()
        elif self.is_live:
            self.is_live = False
        elif self._events and self._events[-1][0].query():
            self._count_events()
            self._stop()
        elif not self._events and self._count % EVERY == 0 and uses_gpu():
            self.is_live = True

    def _count_events(self) -> None:
        if len(self._events) != len(self._phases):
            return
        self.steps += 1
        begin = self._events[0][0]
        for (end, is_idle), phase in zip(self._events[1:], self._phases[1:], strict=True):
            self._milliseconds[phase] += begin.elapsed_time(end)
            begin = end
            if phase in (FORWARD, BACKWARD, OPTIMIZER):
                self.phases += 1
                self.idle += is_idle

    def milliseconds(self) -> dict[str, float] | None:
        """Return the mean milliseconds of each phase, or None without a GPU."""
        if self.steps == 0:
            return None
        return {phase: time / self.steps for phase, time in self._milliseconds.items()}

    def _stop(self) -> None:
        self.is_live = False
        self._stream = None
        self._events.clear()
        self._phases.clear()
