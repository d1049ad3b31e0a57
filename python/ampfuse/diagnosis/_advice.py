"""Says what limits the steps of a program, and what to change."""

import math
import os
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from ampfuse.diagnosis._clock import INPUT, PHASES, Loader, StepClock

FIRST_STEPS = 3  # which allocate, compile and start workers
LEAST_STEPS = 5  # from which medians are computed
WORTH_A_HINT = 0.1  # of the time


def summary(clock: StepClock) -> dict[str, Any] | None:
    """Return the median milliseconds of each phase, or None if there were too few steps."""
    steps = clock.steps[FIRST_STEPS:]
    if len(steps) < LEAST_STEPS:
        return None
    phases = {phase: 1e3 * median(step.get(phase, 0.0) for step in steps) for phase in PHASES}
    return {"count": len(clock.steps), "milliseconds": phases}


def hints(clock: StepClock, steps: dict[str, Any]) -> Iterator[str]:
    """Return sentences about what to change."""
    milliseconds = steps["milliseconds"]
    whole = sum(milliseconds.values())
    wait = milliseconds[INPUT]
    if clock.loaders and wait > WORTH_A_HINT * whole:
        loader = max(clock.loaders, key=lambda one: sum(one.waits))
        yield about_input(loader, wait, whole - wait)
    yield from about_starts(clock)


def about_input(loader: Loader, wait: float, rest: float) -> str:
    """Return a hint for steps that wait `wait` ms for input, and take `rest` ms besides."""
    share = f"{wait / (wait + rest):.0%} of a step ({wait:.1f} ms) waits for input"
    cores = usable_cores()
    # Without workers, a batch takes as long as the wait. With them, a step takes as long as the
    # workers need for one batch together.
    batch = wait if loader.workers == 0 else (wait + rest) * loader.workers
    needed = math.ceil(batch / rest) if rest > 0 else cores
    if needed <= cores and needed > loader.workers:
        now = f"num_workers={loader.workers}"
        return f"{share} with {now}: DataLoader(num_workers={needed}) would hide it."
    return (
        f"{share}: loading a batch takes {batch:.0f} ms of one core, as much as {needed} workers "
        f"could hide, and there are {cores} cores. Make the transforms faster, or store their "
        "results."
    )


def about_starts(clock: StepClock) -> Iterator[str]:
    """Return a hint if workers are started often."""
    total = sum(sum(step.values()) for step in clock.steps)
    for loader in clock.loaders:
        seconds = sum(loader.starts[1:])
        if loader.workers and not loader.persistent_workers and seconds > WORTH_A_HINT * total:
            yield (
                f"Starting the workers of a DataLoader takes {median(loader.starts):.1f} s in each "
                f"of {len(loader.starts)} epochs: persistent_workers=True keeps them."
            )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
