"""Measures how long the GPU is busy with the phases of steps, and whether it waits for the host."""

from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse._graphs import is_capturing, uses_gpu
from ampfuse.tools.diagnosis.phases import BACKWARD, FORWARD, OPTIMIZER, Interval, Listener

EVERY = 8  # steps; events take some microseconds each


class GpuTimes(Listener):
    """The GPU's time for each phase, in every eighth step: the time between two events."""

    def __init__(self) -> None:
        self._streams: set[Any] = set()  # of this step's events
        self._events: list[tuple[Any, bool]] = []  # for each note; True: the GPU was idle then
        self._phases: list[str] = []  # that end with the events
        self._steps: list[list[tuple[Any, bool, str]]] = []

    def noted(self, phase: str, begins: bool) -> None:
        """Record an event."""
        if is_capturing():  # then events are missing, and the step does not count
            return
        stream = torch.cuda.current_stream()
        self._streams.add(stream)
        is_idle = stream.query()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events.append((event, is_idle))

    def read(self, intervals: list[Interval]) -> None:
        """Note the phases to which the events belong."""
        if self.is_live:
            self._phases += [phase for phase, _ in intervals]

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Keep the events of this step if they can be compared, which needs one stream."""
        if self._events and len(self._streams) == 1 and len(self._events) == len(self._phases):
            pairs = zip(self._events, self._phases, strict=True)
            self._steps.append([(event, is_idle, phase) for (event, is_idle), phase in pairs])
        for kept in (self._streams, self._events, self._phases):
            kept.clear()
        self.is_live = step % EVERY == 0 and uses_gpu()

    def _finished(self) -> list[list[tuple[Any, bool, str]]]:
        with suppress(RuntimeError):  # of the GPU, which the program may have caused
            return [step for step in self._steps if step[-1][0].query()]
        return []

    def milliseconds(self) -> dict[str, float] | None:
        """Return the mean milliseconds of each phase, or None without a GPU."""
        times: Counter[str] = Counter()
        steps = self._finished()
        for step in steps:
            for (begin, *_), (end, _, phase) in pairwise(step):
                times[phase] += begin.elapsed_time(end)
        return {phase: time / len(steps) for phase, time in times.items()} or None

    def idle(self) -> float:
        """Return the part of the phases with work for the GPU at whose end it had none left."""
        ends = [
            is_idle
            for step in self._finished()
            for _, is_idle, phase in step[1:]
            if phase in (FORWARD, BACKWARD, OPTIMIZER)
        ]
        return sum(ends) / max(len(ends), 1)
