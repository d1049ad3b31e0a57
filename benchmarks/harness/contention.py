"""Measures how much of the machine other processes used while a case was timed.

Such use makes CPU timings worthless. A parallel loop ends with its slowest thread, so one busy
neighbour can cost far more than its share, and not the same for each implementation.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_OTHER_CORES = 0.2  # more use by others than this is reported below the table
WORKERS_PER_CORE = 4


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy with other processes, as the workers of a DataLoader do."""
    work = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    worker = [sys.executable, "-c", work]
    workers = [subprocess.Popen(worker) for _ in range(WORKERS_PER_CORE * cores())]
    try:
        yield
    finally:
        for process in workers:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class CpuUse:
    """Seconds so far: wall time, CPU time of all processes, and CPU time of this process."""

    wall: float
    everyone: float
    ours: float

    @classmethod
    def now(cls) -> "CpuUse":
        """Read the present times. Without /proc/stat, other processes count as idle."""
        times = os.times()
        ours = times.user + times.system
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return cls(time.perf_counter(), ours, ours)
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
        ticks = user + nice + system + irq + softirq + steal
        return cls(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), ours)

    def other_cores_since(self, start: "CpuUse") -> float:
        """Return how many cores other processes or machines of the host used on average."""
        others = (self.everyone - start.everyone) - (self.ours - start.ours)
        return max(others, 0.0) / (self.wall - start.wall)
