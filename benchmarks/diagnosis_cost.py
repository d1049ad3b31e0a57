"""The time that `python -m ampfuse` adds to a step, to measure phases, memory and loaders.

These are steps that are measured: all of the first 256, then a quarter.

A training loop runs in pairs of short rounds, one with and one without the measurements. Printed
is the median of their differences, with the range in which it lies with a probability of 95 %.

    python benchmarks/diagnosis_cost.py [--rounds 400] [--width 512]
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
from ampfuse.diagnosis._diagnosis import Diagnosis
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60
FIRST = 25  # steps in which more is measured


def main() -> None:
    """Measure, and print a line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--width", type=int, default=512, help="features of the model's layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    epoch = training(options.width)
    epoch()
    plain, added = [], []
    for _ in range(options.rounds):
        times = {}
        for measured in random.sample((False, True), 2):
            with ExitStack() as exits:
                if measured:
                    exits.callback(Diagnosis().stop)
                times[measured] = epoch()
        plain.append(times[False])
        added.append(times[True] - times[False])
    added.sort()
    # Ranks between which the median of n numbers lies, from the binomial distribution.
    margin = 0.98 * math.sqrt(len(added))
    low, high = (added[int(len(added) / 2 + sign * margin)] for sign in (-1, 1))
    step, middle = median(plain), median(added)
    print(
        f"a step takes {1e3 * step:.2f} ms; measuring adds {1e6 * middle:.0f} µs "
        f"({1e6 * low:.0f} to {1e6 * high:.0f}), {middle / step:.1%}"
    )


def training(width: int) -> Callable[[], float]:
    """Return a function that trains for an epoch, and returns the median seconds of a step."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = ampfuse.AdamW(model.parameters(), lr=1e-4)
    scaler = ampfuse.GradScaler("cpu")
    loader = DataLoader(TensorDataset(torch.zeros(STEPS * 64, width)), 64)

    def epoch() -> float:
        seconds, begin = [], time.perf_counter()
        for (batch,) in loader:
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
        return median(seconds[FIRST:])

    return epoch


if __name__ == "__main__":
    main()
