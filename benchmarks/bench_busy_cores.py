"""Loss scaling, clipping and AdamW while other processes keep every core busy.

    python benchmarks/bench_busy_cores.py [--quick] [--cases '*_2_threads/1000x1K/*']

The workers of a DataLoader keep cores busy like this. A parallel loop ends when its last thread
ends, and a thread whose core is busy waits milliseconds for its turn. That may be many times as
long as the whole loop.
Each operation runs on tensors of 1K elements, with torch set to 1, 2 and all threads:

- step_clip  scale, unscale, check for overflow, clip, decide, update the scale (bench_grad_scaler)
- adamw      unscale, check for overflow, clip, AdamW (bench_fused_adam)

The option --threads changes nothing here.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import bench_fused_adam
import bench_grad_scaler
import shapes
import torch
from harness import OURS, Case, Provider, Settings, busy_cores, cores, main

TENSORS = (10, 100, 1000, 10_000)
QUICK = (100, 1000)
# Most tensors × threads: torch's fused AdamW wakes its threads for each tensor, which takes minutes
# for 10,000.
MOST_FOR_TORCH = 10_000
THREADS = sorted({1, 2, cores()})


def with_threads(provider: Provider, threads: int) -> Provider:
    """Return the same provider, which runs with this number of threads."""

    def restore() -> None:
        torch.set_num_threads(threads)
        provider.restore()

    return replace(provider, restore=restore)


def providers(
    setup: Callable[[Settings], Sequence[Provider]], threads: int, settings: Settings
) -> list[Provider]:
    chosen = ("torch", "torch fused", OURS)  # a case has one of the first two
    return [with_threads(p, threads) for p in setup(settings) if p.name in chosen]


def busy(case: Case, tensors: int, threads: int, name: str) -> Case:
    """Return a case of another benchmark as a case of this one."""
    return replace(
        case,
        operation=f"{name}_{threads}_threads",
        setup=partial(providers, case.setup, threads),
        quick=tensors in QUICK,
    )


def cases() -> list[Case]:
    (clip,) = (o for o in bench_grad_scaler.OPERATIONS if o.name == "step_clip")
    (adamw,) = (
        o for o in bench_fused_adam.OPERATIONS if (o.name, o.dtype) == ("step", torch.float32)
    )
    found = []
    for tensors in TENSORS:
        name = f"{tensors}x1K"
        shape_list: list[shapes.Shape] = [(shapes.K,)] * tensors
        for threads in THREADS:
            of_scaler = bench_grad_scaler.case_of(clip, name, shape_list)
            found.append(busy(of_scaler, tensors, threads, "step_clip"))
            if tensors * threads > MOST_FOR_TORCH:
                continue
            of_adamw = bench_fused_adam.case_of(adamw, name, shape_list)
            found.append(busy(of_adamw, tensors, threads, "adamw"))
    return found


if __name__ == "__main__":
    with busy_cores():
        sys.exit(main("busy_cores", cases()))
