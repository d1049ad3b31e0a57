"""How far the outcome of a program in one precision is from that in float32."""

import math
from collections import defaultdict
from itertools import combinations
from statistics import median

from torch import Tensor

from ampfuse.tools.precision.outcome import Outcome
from ampfuse.tools.precision.samples import Gradients

MAIN_PART = 0.05  # of the gradient's norm; modules with less are not judged by themselves
FAR = 0.05  # a module's output that differs by more than this is looked at


class Deviation:
    """How far an outcome is from the outcome in float32. 0.01 is one hundredth."""

    def __init__(self, base: Outcome, other: Outcome) -> None:
        pairs = list(zip(base.gradients, other.gradients, strict=False))
        self.gradient = median([distance(*pair) for pair in pairs]) if pairs else math.inf
        # A loss near 0, as in reinforcement learning, is compared with how losses differ.
        spread = max(base.losses) - min(base.losses) if base.losses else 0.0
        losses = list(zip(base.losses, other.losses, strict=False))[: len(pairs)]
        relative = [relative_difference(*pair, spread) for pair in losses]
        self.loss = median(relative) if relative else math.inf
        self.modules = compare_modules(pairs)
        """The deviation of gradients by module, the largest first."""
        self.first_module = find_far_module(base, other)
        """The first module whose output is far from that in float32, or an empty text."""
        is_same = are_alike(base.weights, other.weights) and are_alike(base.inputs, other.inputs)
        self.is_comparable = is_same or other.failure is not None
        """False if the runs had other weights or batches."""


def relative_difference(a: float, b: float, spread: float) -> float:
    """Return the difference of two losses relative to the first, or to a larger spread."""
    difference = 0.0 if a == b else abs(b - a) / (max(abs(a), spread) or math.nan)
    return math.inf if math.isnan(difference) else difference


def are_alike(a: float | None, b: float | None) -> bool:
    """Return True if two sums are of the same numbers."""
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def sum_squares(first: Gradients, second: Gradients) -> dict[str, tuple[float, float]]:
    """Return for each parameter the squared norms of the gradients' difference and of the first."""
    found = {}
    for name, (taken, weight) in first.items():
        other = second[name][0] if name in second else 0.0  # zero gradients are left out
        difference, norm = (float(x.double().square().sum()) for x in (taken - other, taken))
        found[name] = weight * difference, weight * norm
    return found


def distance(first: Gradients, second: Gradients) -> float:
    """Return the norm of the difference of two gradients, relative to the first one's norm."""
    squares = sum_squares(first, second).values()
    difference, norm = (sum(one[i] for one in squares) for i in (0, 1))
    return math.sqrt(difference / norm) if norm and not math.isnan(difference) else math.inf


def compare_modules(pairs: list[tuple[Gradients, Gradients]]) -> dict[str, float]:
    """Return the deviations of modules that have more than a small part of the gradient."""
    differences: dict[str, float] = defaultdict(float)
    norms: dict[str, float] = defaultdict(float)
    for pair in pairs:
        for name, (difference, norm) in sum_squares(*pair).items():
            module = name.rpartition(".")[0] or name
            differences[module] += difference
            norms[module] += norm
    least = MAIN_PART**2 * sum(norms.values())
    found = {
        module: math.sqrt(differences[module] / norm)
        for module, norm in norms.items()
        if norm > least
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def find_far_module(base: Outcome, other: Outcome) -> str:
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


def measure_noise(outcome: Outcome) -> float:
    """Return how far the gradients of two batches are from each other; 0 if that is unknown."""
    found = [
        distance(first, second)
        for first, second in combinations(outcome.gradients, 2)
        if first and first.keys() == second.keys()
    ]
    return median(found) if found else 0.0
