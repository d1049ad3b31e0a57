"""Finds the lines of a program that take the time, by looking at a thread now and then."""

import random
import sys
import threading
import time
from collections import defaultdict
from types import CodeType
from typing import NamedTuple

from ampfuse._program_lines import Place, place, program_frame
from ampfuse.diagnosis._phases import Interval

# Seconds between two samples, on average. A sample takes the program about half a millisecond, so
# there are fewer when the program has run for some seconds.
INTERVAL = 0.03
LONGEST_INTERVAL = 0.2


class Line(NamedTuple):
    """A line of the program, and its part of the time."""

    phase: str
    place: Place
    share: float


class LineSampler:
    """Samples the line that a thread executes. The phases of samples are known only later."""

    def __init__(self) -> None:
        # Samples of which no phase is known yet: their time, code, instruction, and seconds.
        self._recent: list[tuple[float, CodeType, int, float]] = []
        self._seconds: defaultdict[tuple[str, CodeType, int], float] = defaultdict(float)
        self._sampled = threading.get_ident()
        self._random = random.Random()  # its own, since the program may have seeded the other one
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ampfuse.lines", daemon=True)

    def start(self) -> None:
        """Begin to sample the thread that made this sampler."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._done.set()
        self._thread.join()

    def read(self, intervals: list[Interval]) -> None:
        """Count the samples in these intervals."""
        if not self._recent:
            return
        recent, self._recent = self._recent, []
        ends = iter(intervals)
        phase, end = next(ends, (None, 0.0))
        for now, code, instruction, seconds in recent:
            while phase is not None and end < now:
                phase, end = next(ends, (None, 0.0))
            if phase is None:
                return
            self._seconds[phase, code, instruction] += seconds

    def drop(self) -> None:
        """Do not count the samples since the last call."""
        self._recent = []

    def forget(self) -> None:
        """Count anew."""
        self._seconds.clear()

    def lines(self) -> list[Line]:
        """Return the lines, the one that takes most time first."""
        found: defaultdict[tuple[str, Place], float] = defaultdict(float)
        for (phase, code, instruction), seconds in self._seconds.items():
            found[phase, place(code, instruction)] += seconds
        total = sum(found.values())
        lines = [Line(phase, where, size / total) for (phase, where), size in found.items()]
        return sorted(lines, key=lambda line: -line.share)

    def _run(self) -> None:
        start = time.perf_counter()
        while True:
            longest = min((time.perf_counter() - start) / 100, LONGEST_INTERVAL)
            # Steps may take as long as an interval, so intervals differ.
            seconds = max(INTERVAL, longest) * self._random.uniform(0.5, 1.5)
            if self._done.wait(seconds):
                return
            frame = program_frame(sys._current_frames().get(self._sampled))
            if frame is not None:
                now = time.perf_counter()
                self._recent.append((now, frame.f_code, frame.f_lasti, seconds))
            del frame
