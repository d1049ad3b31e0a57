"""Says what limits the steps of a program, and what to change."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ampfuse._graphs import uses_gpu
from ampfuse._texts import percent, size_text
from ampfuse.tools.diagnosis.gpu_times import GpuTimes
from ampfuse.tools.diagnosis.habits import WATCHED, Habits, WideLogits
from ampfuse.tools.diagnosis.lines import Line, merge
from ampfuse.tools.diagnosis.loaders import Loader
from ampfuse.tools.diagnosis.phases import INPUT, OTHER
from ampfuse.tools.memory.monitor import Monitor

WORTH_A_HINT = 0.1  # of the time
LEAST_WAIT = 2.0  # ms; a worker takes about 1 ms to send a batch
WAITS = ("item", "tolist", "cpu", "synchronize")  # functions in which the host waits for a GPU
COPIES = ("to", "cuda", "copy_")
NEEDED = ("clip_grad_norm_", "step", "unscale_", "update")  # parts of a training step
MANY_COMPILATIONS = 3
LEAST_LOGITS = 2**20  # bytes
FEW_CORES = 4
MANY_STEPS = 100
MOSTLY = 0.5


def hints(steps: dict[str, Any], loaders: list[Loader], lines: list[Line]) -> Iterator[str]:
    """Return what follows from the times of steps."""
    milliseconds = steps["milliseconds"]
    whole = sum(milliseconds.values())
    wait = milliseconds[INPUT]
    loaders = [loader for loader in loaders if loader.trains]
    yield from explain_starts(loaders, steps["measured"] * whole / 1e3)
    rest = whole - wait
    wait -= 1e3 * sum(map(starting_time, loaders)) / steps["measured"]
    if loaders and wait > max(WORTH_A_HINT * whole, LEAST_WAIT):
        loader = max(loaders, key=lambda one: one.waited)
        per_step = loader.batches / steps["measured"]
        yield explain_input(loader, per_step, wait, rest) + name_slowest(loader, lines)
    evaluation = steps["evaluation"]
    if steps["evaluated"] > MOSTLY * steps["measured"] and evaluation > WORTH_A_HINT * whole:
        yield (
            f"Most steps are followed by an evaluation, which takes {evaluation:,.1f} ms, beside "
            f"{whole:,.1f} ms of the step itself: evaluate less often."
        )
    yield from explain_lines(lines, milliseconds[OTHER] / whole)


def explain_input(loader: Loader, per_step: float, wait: float, rest: float) -> str:
    """Return a hint for steps that wait `wait` ms for input, and take `rest` ms besides.

    `per_step`: batches of a step, more than one if gradients are accumulated.
    """
    share = f"{wait / (wait + rest):.0%} of a step ({wait:.1f} ms) waits for input"
    measured = loader.batch_time()
    # If it is not measured: a step takes as long as all workers together need for its batches.
    batch = (wait + rest) * loader.workers / per_step if measured is None else 1e3 * measured
    needed = max(math.ceil(per_step * batch / rest), 1)
    cores = usable_cores()
    if needed <= loader.workers:
        return (
            f"{share}, though {needed} of {loader.workers} workers would do: a larger "
            "prefetch_factor helps if some batches take longer than others; if not, send smaller "
            "ones, for example images as bytes."
        )
    if needed <= cores:
        cost = "" if uses_gpu() else ", or a part of it, since training on a CPU needs cores, too"
        return (
            f"{share} with num_workers={loader.workers}: DataLoader(num_workers={needed}) would "
            f"hide it{cost}."
        )
    return (
        f"{share}: loading a batch takes {batch:.0f} ms, as much as {needed} workers could hide, "
        f"and there are {cores} cores. Make the transforms faster, or store their results; if they "
        "mostly wait for a disk or a network, more workers help, too."
    )


def name_slowest(loader: Loader, lines: list[Line]) -> str:
    """Return a sentence about the line that takes most of the loading, or an empty text."""
    slowest = loader.slowest_line()
    inputs = [line for line in lines if line.phase == INPUT]
    if not loader.workers and inputs:
        share = inputs[0].share / sum(line.share for line in inputs)
        slowest = inputs[0]._replace(share=share)
    if slowest is None or slowest.place.where == loader.loop:  # the dataset has no line of its own
        return ""
    return f" {slowest.share:.0%} of the loading is at {named(slowest)}."


def explain_starts(loaders: list[Loader], total: float) -> Iterator[str]:
    """Return a hint if workers are started often, in a program that has trained `total` seconds."""
    restarted = [one for one in loaders if one.workers and not one.persistent_workers]
    if sum(map(starting_time, restarted)) > WORTH_A_HINT * total:
        starts = [start for loader in restarted for start in loader.starts]
        yield (
            f"Starting the workers of a DataLoader takes {1e3 * median(starts):,.0f} ms until the "
            f"first batch, in each of {len(starts)} epochs: make the DataLoader once, and "
            "DataLoader(persistent_workers=True) keeps them."
        )


def starting_time(loader: Loader) -> float:
    """Return the seconds that later starts of workers took, without the loading of a batch."""
    batch = loader.batch_time() or 0.0
    return sum(max(start - batch, 0.0) for start in loader.late_starts if loader.workers)


def explain_lines(lines: list[Line], other: float) -> Iterator[str]:
    """Return hints about lines that wait for the GPU, or that are outside of training.

    `other`: the part of the time outside of forward, backward and optimizer.
    """
    others = []
    for line in lines:
        waits = uses_gpu() and line.place.call in WAITS
        if line.phase == OTHER and not waits and line.place.call not in NEEDED:
            others.append(line)
        if line.phase == INPUT or line.share < WORTH_A_HINT:
            continue
        if waits:
            yield (
                f"The host waits for the GPU during {line.share:.0%} of the time at {named(line)}. "
                "Meanwhile it cannot prepare the next step. Add up such numbers on the GPU, and "
                "read the sum once in 50 steps."
            )
        elif uses_gpu() and line.place.call in COPIES:
            yield (
                f"The host waits for copies to the GPU during {line.share:.0%} of the time at "
                f"{named(line)}. DataLoader(pin_memory=True) and to(device, non_blocking=True) "
                "copy while the host goes on."
            )
    for line in merge(others):
        if min(line.share, other) > WORTH_A_HINT:
            yield (
                f"{line.share:.0%} of the time passes outside of forward, backward and optimizer "
                f"at {named(line)}. Is it needed in each step?"
            )


def explain_habits(habits: Habits, steps: int) -> Iterator[str]:
    """Return hints about what a program does in each step."""
    if habits.anomaly_checks > MOSTLY * min(steps, WATCHED):
        yield (
            "torch.autograd.set_detect_anomaly(True) checks each operator of backward, which "
            "takes a multiple of the time: remove it when the error is found."
        )
    if habits.compilations >= MANY_COMPILATIONS:
        yield (
            f"torch.compile compiled again in {habits.compilations} steps after the first ones, "
            "probably since shapes change: DataLoader(drop_last=True) or padding keeps them, and "
            "torch.compile(dynamic=True) compiles for all of them. TORCH_LOGS=recompiles says why."
        )
    if habits.keeps_gradients:
        yield (
            "No gradient is set to zero between steps, so each step uses the sum of all gradients "
            "so far: call optimizer.zero_grad() once per step."
        )
    if habits.without_gradients:
        yield (
            f"{habits.without_gradients} took its first {min(steps, WATCHED)} steps without any "
            "gradient: do its parameters belong to another model?"
        )
    if habits.rounded is not None:
        yield (
            f"Weights are {habits.rounded}, and their optimizer keeps no float32 masters, so "
            f"updates of less than {percent(torch.finfo(habits.rounded).eps / 4)} of a weight are "
            "lost. ampfuse.AdamW and SGD keep masters, and ampfuse.Mastered for other optimizers; "
            "or use float32 weights and torch.autocast."
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_slow_cpu = torch.get_num_threads() == 1 and usable_cores() >= FEW_CORES * processes
    if steps and is_slow_cpu and not uses_gpu():
        yield (
            f"torch uses 1 of {usable_cores()} cores: set OMP_NUM_THREADS, or call "
            "torch.set_num_threads."
        )


def explain_logits(logits: WideLogits) -> Iterator[str]:
    """Return a hint about logits that are converted to float32."""
    if logits.bytes >= LEAST_LOGITS:
        where = "" if logits.place is None else f" before {logits.place.where}"
        yield (
            f"Logits of {logits.dtype} are converted to float32{where}, which takes "
            f"{size_text(logits.bytes)}, and as much for their gradient. Pass them as they are: "
            "ampfuse's cross_entropy computes in float32 itself."
        )


def explain_memory(memory: Monitor) -> Iterator[str]:
    """Return a hint about memory that grows."""
    growth = memory.growth()
    # Without tensors, only long growth is more than noise: most programs append to some list.
    is_certain = any(one.bytes for one in memory.suspects) or memory.steps >= MANY_STEPS
    if growth is None or not memory.suspects or not is_certain:
        return
    suspects = "; ".join(map(str, memory.suspects))
    text = f"Memory grows by {size_text(growth)} a step, and this stays: {suspects}."
    if sum(one.bytes for one in memory.suspects) < MOSTLY * growth:
        text += " The rest may be freed memory between them, which cannot be given back."
    yield f"{text} Keep numbers (loss.item()) or detached tensors (loss.detach())."


def explain_gpu(gpu: GpuTimes) -> Iterator[str]:
    """Return a hint if the GPU waits for the host."""
    if (idle := gpu.idle()) > MOSTLY:
        yield (
            f"The GPU had nothing left to do at the end of {idle:.0%} of the phases: it waits for "
            "the host. torch.compile, ampfuse.GraphedStep or a larger batch give it more work at a "
            "time."
        )


def named(line: Line) -> str:
    """Return a line's place and text."""
    where, text, _ = line.place
    return f"{where}, `{text}`" if text else where


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    try:  # the limit of a container: microseconds of all cores in a period of microseconds
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(limit) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores
