"""The time that `python -m ampfuse` adds to a step, to measure phases, memory and loaders.

A training loop runs in rounds of three epochs, in random order: without measurements, with steps
that are measured, and with steps that are only counted, as most steps of a long program are.
Printed are the medians of the differences, each with the range in which it lies with a probability
of 95 %. Before each step all caches are filled with something else, as a large model
does.

    python benchmarks/diagnosis_cost.py [--rounds 300] [--width 512]
"""

import math
import random
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import ampfuse
import torch
from ampfuse.tools.diagnosis import clock
from ampfuse.tools.diagnosis.diagnosis import Diagnosis
from harness.timing import cache_flusher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60
FIRST = 25  # steps in which more is measured
FOREVER = 10**9  # steps


def main() -> None:
    """Measure, and print the time of a step and what measurements add to it."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--width", type=int, default=512, help="features of the model's layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    epoch = training(options.width)
    epoch()
    measured_first = {"measured": FOREVER, "counted": 1}
    plain: list[float] = []
    added: dict[str, list[float]] = {kind: [] for kind in measured_first}
    for _ in range(options.rounds):
        times = {}
        for kind in random.sample(["plain", *measured_first], 3):
            with ExitStack() as exits:
                if kind in measured_first:
                    clock.MEASURED = measured_first[kind]
                    exits.callback(Diagnosis(print).stop)
                times[kind] = epoch()
        plain.append(times["plain"])
        for kind, differences in added.items():
            differences.append(times[kind] - times["plain"])
    step = median(plain)
    print(f"a step takes {1e3 * step:.2f} ms")
    for kind, differences in added.items():
        print(f"{kind}: {with_range(differences)} more")


def with_range(seconds: list[float]) -> str:
    """Return the median and its range in microseconds."""
    ordered = sorted(seconds)
    # Ranks between which the median of n numbers lies, from the binomial distribution.
    margin = 0.98 * math.sqrt(len(ordered))
    low, high = (ordered[int(len(ordered) / 2 + sign * margin)] for sign in (-1, 1))
    return f"{1e6 * median(seconds):.0f} µs ({1e6 * low:.0f} to {1e6 * high:.0f})"


def training(width: int) -> Callable[[], float]:
    """Return a function that trains for an epoch, and returns the median seconds of a step."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = ampfuse.AdamW(model.parameters(), lr=1e-4)
    scaler = ampfuse.GradScaler("cpu")
    loader = DataLoader(TensorDataset(torch.zeros(STEPS * 64, width)), 64)
    flush = cache_flusher(torch.device("cpu"))

    def epoch() -> float:
        seconds, batches = [], iter(loader)
        for _ in range(STEPS):
            flush()
            begin = time.perf_counter()
            (batch,) = next(batches)
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
        return median(seconds[FIRST:])

    return epoch


if __name__ == "__main__":
    main()
