"""Samples the slowest lines of a program."""

import _thread
import random
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple

from ampfuse.tools.diagnosis.phases import Interval
from ampfuse.tools.program_lines import Place, place, program_frame

# Mean seconds between two samples, which differ, since steps may take as long. A sample takes the
# program about half a millisecond.
INTERVAL = 0.05
MOST_RECENT = 1000  # samples, in a program that takes no steps


class Line(NamedTuple):
    """A line of the program, and its part of the time."""

    phase: str
    place: Place
    share: float


def add_up(lines: Iterable[Line]) -> list[Line]:
    """Add up equal lines, and return the one with the largest share first."""
    shares: defaultdict[tuple[str, Place], float] = defaultdict(float)
    for phase, where, share in lines:
        shares[phase, where] += share
    found = [Line(*where, share) for where, share in shares.items()]
    return sorted(found, key=lambda line: -line.share)


def merge(lines: list[Line]) -> list[Line]:
    """Add up lines that differ only in the function that is called there."""
    return add_up(line._replace(place=line.place._replace(call="")) for line in lines)


class LineSampler:
    """Samples the line that the present thread executes. Phases are known only later.

    Its own thread is not among those of `threading.enumerate()`, on which a program may wait, and
    gets no signals, which a program may have blocked to wait for them.
    """

    def __init__(self) -> None:
        # Samples of which no phase is known yet: their time, code, instruction, and the seconds
        # since the sample before.
        self._recent: deque[tuple[float, CodeType, int, float]] = deque(maxlen=MOST_RECENT)
        self._seconds: defaultdict[tuple[str, CodeType, int], float] = defaultdict(float)
        self._sampled = threading.get_ident()
        self._random = random.Random()  # its own, since the program may have seeded the other one
        self._done, self._ended = threading.Event(), threading.Event()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def stop(self) -> None:
        """Stop sampling."""
        self._done.set()
        self._ended.wait()

    def read(self, intervals: list[Interval]) -> None:
        """Count the samples in these intervals."""
        ends = iter(intervals)
        phase, end = next(ends, (None, 0.0))
        while self._recent:
            now, code, instruction, seconds = self._recent.popleft()
            while phase is not None and end < now:
                phase, end = next(ends, (None, 0.0))
            if phase is not None:
                self._seconds[phase, code, instruction] += seconds

    def drop(self) -> None:
        """Do not count the samples since the last call."""
        self._recent.clear()

    def forget(self) -> None:
        """Drop all samples that were counted."""
        self._seconds.clear()

    def lines(self, most: int | None = None) -> list[Line]:
        """Return the lines, the one that takes most time first; of the slowest places if `most`."""
        total = sum(self._seconds.values())
        slowest = sorted(self._seconds.items(), key=lambda item: -item[1])[:most]
        return add_up(
            Line(phase, place(code, instruction), seconds / total)
            for (phase, code, instruction), seconds in slowest
        )

    def _run(self) -> None:
        last = time.perf_counter()
        try:
            while not self._done.wait(INTERVAL * self._random.uniform(0.5, 1.5)):
                frame = program_frame(sys._current_frames().get(self._sampled))
                now = time.perf_counter()
                if frame is not None:
                    # The wait is longer than it was meant to be if a line keeps Python's lock.
                    self._recent.append((now, frame.f_code, frame.f_lasti, now - last))
                last = now
                del frame
        finally:
            self._ended.set()
