"""The outcome of a program in one precision, and its deviation from that in float32."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ampfuse._texts import without_numbers
from ampfuse.tools.precision.precisions import FIRST_SCALE, Precision
from ampfuse.tools.precision.samples import Gradients, Outputs

SMALL = 1e-3  # of the gradient's norm; modules with less are not shown
MAIN_PART = 0.05  # of the gradient's norm; modules with less are not judged by themselves
FAR = 0.05  # a module's output that differs by more than this is looked at


@dataclass(frozen=True)
class Program:
    """A program that is run."""

    words: list[str]
    """Its name and arguments."""
    is_module: bool
    steps: int


@dataclass(frozen=True)
class Outcome:
    """The measurements of a program that ran in one precision."""

    precision: Precision
    failure: str | None
    """How the program failed, or None."""
    data: dict[str, Any]
    """All other measurements; see `Trial.result`."""
    gradients: list[Gradients]
    outputs: Outputs

    @property
    def milliseconds(self) -> float | None:
        """The time of a step: the median."""
        seconds = self.data.get("seconds")
        return 1e3 * median(seconds) if seconds else None

    @property
    def peak(self) -> int | None:
        """The peak of memory in bytes."""
        peak: int | None = self.data.get("peak")
        return peak

    @property
    def losses(self) -> list[float]:
        """The loss of each backward."""
        return list(self.data.get("losses", []))

    @property
    def operators(self) -> dict[str, Any]:
        """The record of its operators; see `Operators`."""
        return dict(self.data.get("operators", {}))

    @property
    def exponents(self) -> dict[int, int]:
        """Numbers of 16-bit values in backward, by exponent."""
        found = self.operators.get("exponents", {})
        return {int(exponent): count for exponent, count in found.items()}

    @cached_property
    def is_finite(self) -> bool:
        """True if all losses and gradients are finite."""
        are_gradients = all(
            bool(taken.isfinite().all()) for one in self.gradients for taken, _ in one.values()
        )
        return are_gradients and all(map(math.isfinite, self.losses))


def run(
    program: Program,
    precision: Precision,
    backwards: int | None = None,
    scale: float = FIRST_SCALE,
    slowest: float = math.inf,
) -> Outcome:
    """Run the program in another process.

    The run ends after the program's steps, after `backwards` calls of backward, or after a few
    steps if each takes more than `slowest` milliseconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "words": program.words,
            "is_module": program.is_module,
            "steps": program.steps,
            "precision": precision.name,
            "kept": precision.kept,
            "backwards": backwards,
            "scale": scale,
            "slowest": slowest,
            "folder": folder,
        }
        command = [sys.executable, "-m", "ampfuse.tools.precision.process", json.dumps(order)]
        printed = Path(folder) / "printed"  # not a pipe, which the program's children may keep open
        with printed.open("wb") as output:
            nothing = subprocess.DEVNULL
            done = subprocess.run(command, stdin=nothing, stdout=output, stderr=output, check=False)
        file = Path(folder) / "result.json"
        if not file.exists():
            text = printed.read_bytes().decode(errors="replace").strip().rpartition("\n")[2]
            failure = text or f"the process ended with code {done.returncode}"
            return Outcome(precision, failure, {}, [], {})
        data = json.loads(file.read_text())
        gradients, outputs = torch.load(Path(folder) / "samples.pt")
    return Outcome(precision, data["failure"], data, gradients, outputs)


class Deviation:
    """How far an outcome is from the outcome in float32. 0.01 is one hundredth, NaN unknown."""

    def __init__(self, base: Outcome, other: Outcome) -> None:
        pairs = list(zip(base.gradients, other.gradients, strict=False))
        self.gradient = median([distance(*pair) for pair in pairs]) if pairs else math.nan
        losses = zip(base.losses[: len(pairs)], other.losses[: len(pairs)], strict=True)
        # A loss near 0, as in reinforcement learning, is compared with how losses differ.
        spread = max(base.losses) - min(base.losses) if base.losses else 0.0
        relative = [relative_difference(a, b, spread) for a, b in losses]
        self.loss = median(relative) if relative else math.nan
        self.kinds = by_module(pairs, SMALL, kind_of)
        """The deviation of gradients by kind of module, the largest first."""
        self.main_modules = by_module(pairs, MAIN_PART, str)
        """The same for each module that has more than a small part of the gradient."""
        self.first_module = first_far_module(base, other)
        """The first module whose output is far from that in float32, or an empty text."""
        # 16-bit weights are rounded, so their sum differs.
        names = ["inputs"] if other.precision.has_16bit_weights else ["inputs", "weights"]
        self.is_comparable = all(alike(base.data.get(n), other.data.get(n)) for n in names)
        """False if the runs had other weights or batches."""


def relative_difference(a: float, b: float, spread: float) -> float:
    """Return the difference of two losses relative to the first, or to a larger spread."""
    return 0.0 if a == b else abs(b - a) / (max(abs(a), spread) or math.nan)


def alike(a: float | None, b: float | None) -> bool:
    """Return True if two sums are of the same numbers."""
    if a is not None and b is not None and math.isnan(a) and math.isnan(b):
        return True
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def distance(first: Gradients, second: Gradients) -> float:
    """Return the norm of the difference of two gradients, relative to the first one's norm."""
    squares = [square_of_difference(first, second, name) for name in first]
    whole = sum(square(*gradient) for gradient in first.values())
    return math.sqrt(sum(squares) / whole) if whole else math.nan


def square(taken: Tensor, weight: float) -> float:
    """Return the estimated square of the norm of a sampled gradient."""
    return float(taken.double().square().sum()) * weight


def square_of_difference(first: Gradients, second: Gradients, name: str) -> float:
    """Return the estimated square of the norm of the difference for one parameter."""
    taken, weight = first[name]
    if name not in second:  # its gradient is zero
        return square(taken, weight)
    return square(taken - second[name][0], weight)


def by_module(
    pairs: list[tuple[Gradients, Gradients]], least: float, named: Callable[[str], str]
) -> dict[str, float]:
    """Return the deviations of modules that have at least this part of the gradient's norm."""
    differences: dict[str, float] = {}
    norms: dict[str, float] = {}
    for first, second in pairs:
        for name in first:
            module = named(name.rpartition(".")[0] or name)
            difference = square_of_difference(first, second, name)
            differences[module] = differences.get(module, 0.0) + difference
            norms[module] = norms.get(module, 0.0) + square(*first[name])
    whole = sum(norms.values())
    found = {
        module: math.sqrt(differences[module] / norm)
        for module, norm in norms.items()
        if norm > least**2 * whole
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kind_of(module: str) -> str:
    """Return a name for all modules that are repeated like this one."""
    kind = without_numbers(module)
    return module if kind == "*" else kind


def first_far_module(base: Outcome, other: Outcome) -> str:
    """Return the first module that makes a far output of an input that is not far."""
    for name, (expected_input, expected) in base.outputs.items():
        if name not in other.outputs:
            continue
        given, got = other.outputs[name]
        if is_far(expected, got) and not is_far(expected_input, given):
            return name
    return ""


def is_far(expected: Tensor | None, got: Tensor | None) -> bool:
    """Return True if a sample differs from the expected one, or is not finite."""
    if expected is None or got is None or got.shape != expected.shape:
        return False
    return not float((got - expected).norm()) <= FAR * float(expected.norm())


def noise(outcome: Outcome) -> float:
    """Return how far the gradients of two batches are from each other; NaN if that is unknown."""
    gradients = outcome.gradients
    found = [
        distance(first, second)
        for index, first in enumerate(gradients)
        for second in gradients[index + 1 :]
        if first.keys() == second.keys()
    ]
    return median(found) if found else math.nan
