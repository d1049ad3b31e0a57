"""Measures a training program: time and memory by part, and the loss over time."""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import text
import torch
from model import LENGTH, VOCABULARY
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from meter import Meter

MEASURED = 3  # number of steps at the end of a run in which the parts are measured


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the options of both programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--precision", default="float16" if on_gpu else "bfloat16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=16, help=f"of {LENGTH} words, in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="in a step")
    parser.add_argument("--recompute", action="store_true", help="activations, in backward")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--report", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    if given.sequences % given.micro_batches:
        parser.error(f"--sequences: expected a multiple of {given.micro_batches} micro-batches")
    return given


class Measured:
    """The batches of a run, and its figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._text = text.words(VOCABULARY)
        self._losses: list[Tensor] = []
        self._ends: list[float] = []  # end of each step, in seconds since the first step began
        self._seconds = defaultdict[str, list[float]](list)
        self._seconds_of_step = defaultdict[str, float](float)
        self._peaks: dict[str, int] = {}
        self._meter = Meter(options.device)

    def batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield words and targets of each step's micro-batches, on the device."""
        options = self._options
        steps = options.steps + MEASURED
        chosen = text.batches(self._text, steps, options.sequences, LENGTH)
        self._start = time.perf_counter()
        for words, targets in chosen:
            pair = (words.to(options.device), targets.to(options.device))
            yield list(zip(*(one.chunk(options.micro_batches) for one in pair), strict=True))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of a step. Only the last steps are measured, since the host waits."""
        if len(self._ends) < self._options.steps:
            yield
            return
        self._meter.wait()
        self._meter.reset_peak()
        start = time.perf_counter()
        yield
        self._meter.wait()
        self._seconds_of_step[name] += time.perf_counter() - start
        self._peaks[name] = max(self._meter.peak(), self._peaks.get(name, 0))

    def ended_step(self, loss: Tensor) -> None:
        """Record the loss and print the progress."""
        self._losses.append(loss.detach())
        for name, seconds in self._seconds_of_step.items():
            self._seconds[name].append(seconds)
        self._seconds_of_step.clear()
        done = len(self._losses)
        if done <= self._options.steps:
            self._meter.wait()  # otherwise only the launches would be timed
            self._ends.append(time.perf_counter() - self._start)
            print(f"step {done} of {self._options.steps}", flush=True)

    def report(self) -> None:
        """Print the figures, or write them to the file of `--report`."""
        losses = torch.stack(self._losses).tolist()[: self._options.steps]
        steps = [end - start for start, end in itertools.pairwise(self._ends)]
        seconds = statistics.median(steps)
        figures = {
            "logits": [self._options.sequences * LENGTH, VOCABULARY],
            "losses": losses,
            "ends": self._ends,
            "seconds": seconds,
            "seconds_of": {part: statistics.median(s) for part, s in self._seconds.items()},
            "bytes_of": self._peaks,
        }
        if self._options.report:
            self._options.report.write_text(json.dumps(figures))
        else:
            print(f"loss {losses[0]:.2f}, at the end {losses[-1]:.2f}; {seconds:.3f} s per step")
