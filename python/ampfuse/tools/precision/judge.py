"""Judges which precisions are accurate, and which are worth it."""

import math
from dataclasses import replace

from ampfuse.tools.diagnosis.phases import FORWARD
from ampfuse.tools.precision.operators import ZERO
from ampfuse.tools.precision.outcome import Deviation, Outcome, noise
from ampfuse.tools.precision.precisions import BFLOAT16, UNSCALED, Precision

# The limit of a gradient's deviation is 30 % of the distance between the gradients of two batches,
# but at least 5 %, since all batches may be the same, and at most 30 % of the gradient.
PART_OF_NOISE = 0.3
LEAST, MOST = 0.05, 0.3
MOST_OF_LOSS = 0.05
MOST_OF_MODULE = 0.3  # of the gradient of one module
FASTER = 0.9  # of the time in float32
NOT_SLOWER = 1.05
CONTENDS = 2.0  # times the least time
VARIES = 0.1  # of the time, by which two runs differ
SMALLER = 0.85  # of the memory in float32
LEAST_SAVED = 64 * 2**20  # bytes; less may be noise of a process
SMALLEST, LARGEST = -24, 15  # exponents of float16


class Judge:
    """Compares outcomes with that in float32."""

    def __init__(self, base: Outcome) -> None:
        self.base = base
        self.noise = noise(base)
        self.limit = LEAST if math.isnan(self.noise) else limit_for(self.noise)
        self.outcomes: dict[Precision, Outcome] = {}
        self.deviations: dict[Precision, Deviation] = {}
        self.in_vain: list[str] = []
        """The kinds of modules that float32 did not fix."""
        self.spread = 0.0
        """The largest difference of times between two runs, relative to the shorter one."""

    @property
    def scale(self) -> float:
        """The largest scale by which no gradient overflows in float16; 65536 if none is known."""
        known = self.outcomes.get(BFLOAT16)
        return largest_scale({} if known is None else known.exponents)

    @property
    def is_comparable(self) -> bool:
        """True if all runs had the same weights and batches at first."""
        return all(
            self.deviations[one].is_comparable
            for one, outcome in self.outcomes.items()
            if not outcome.failure
        )

    def add(self, outcome: Outcome) -> None:
        """Add an outcome in another precision."""
        self.outcomes[outcome.precision] = outcome
        self.deviations[outcome.precision] = Deviation(self.base, outcome)

    def drop(self, precision: Precision) -> None:
        """Remove an outcome."""
        del self.outcomes[precision], self.deviations[precision]

    def run_again(self, outcome: Outcome) -> None:
        """Add a second outcome in a precision. The faster one counts for times.

        Other work of the machine makes a run slower, but none makes it faster.
        """
        first = self.outcomes.get(outcome.precision, self.base)
        if outcome.milliseconds is None or first.milliseconds is None:
            return
        times = sorted((outcome.milliseconds, first.milliseconds))
        self.spread = max(self.spread, times[1] / times[0] - 1)
        if outcome.milliseconds < first.milliseconds:
            first = replace(first, data=first.data | times_of(outcome))
        if outcome.precision in self.outcomes:
            self.outcomes[outcome.precision] = first
        else:
            self.base = first

    def is_accurate(self, precision: Precision) -> bool:
        """Return True if a precision computes about the same as float32."""
        outcome, deviation = self.outcomes.get(precision), self.deviations.get(precision)
        if outcome is None or deviation is None or outcome.failure or not outcome.is_finite:
            return False
        is_close = deviation.gradient <= self.limit and deviation.loss <= MOST_OF_LOSS
        return is_close and self.far_module(precision) is None

    def far_module(self, precision: Precision) -> tuple[str, float] | None:
        """Return the module whose gradient is too far off, and its deviation; or None."""
        modules = self.deviations[precision].main_modules
        worst = next(iter(modules.items()), None)
        return worst if worst is not None and worst[1] > MOST_OF_MODULE else None

    def is_worth_it(self, precision: Precision) -> bool:
        """Return True if a precision saves time, or memory without taking more time."""
        outcome = self.outcomes[precision]
        speed = self.time_ratio(outcome)
        return speed <= FASTER or (speed <= NOT_SLOWER and self.saves_memory(outcome, self.base))

    def time_ratio(self, outcome: Outcome) -> float:
        """Return the time of a step relative to that in float32."""
        if not outcome.milliseconds or not self.base.milliseconds:
            return math.inf
        return outcome.milliseconds / self.base.milliseconds

    def saves_memory(self, outcome: Outcome, other: Outcome) -> bool:
        """Return True if an outcome takes clearly less memory than another one."""
        if outcome.peak is None or other.peak is None:
            return False
        return outcome.peak <= min(SMALLER * other.peak, other.peak - LEAST_SAVED)

    def best(self) -> Precision | None:
        """Return the best precision that is accurate and worth it, or None.

        Several may be about as fast as the fastest. The first of them is returned, the simplest.
        """
        able = [
            one
            for one in self.outcomes
            if one != UNSCALED and self.is_accurate(one) and self.is_worth_it(one)
        ]
        if not able:
            return None
        least = min(self.time_ratio(self.outcomes[one]) for one in able)
        able = [one for one in able if self.time_ratio(self.outcomes[one]) <= NOT_SLOWER * least]
        first = able[0]
        smaller = [
            one for one in able if self.saves_memory(self.outcomes[one], self.outcomes[first])
        ]
        return smaller[0] if smaller else first

    def fastest(self) -> Precision | None:
        """Return the fastest precision that is accurate, or None."""
        able = [one for one in self.outcomes if one != UNSCALED and self.is_accurate(one)]
        return min(able, key=lambda one: self.time_ratio(self.outcomes[one]), default=None)

    def contenders(self) -> list[Precision]:
        """Return the precisions that may be the fastest accurate one."""
        if (fastest := self.fastest()) is None:
            return []
        least = self.time_ratio(self.outcomes[fastest])
        return [
            one
            for one in self.outcomes
            if one != UNSCALED
            and self.is_accurate(one)
            and self.time_ratio(self.outcomes[one]) <= CONTENDS * least
        ]

    def culprit(self, precision: Precision) -> dict[str, str] | None:
        """Return the first operator of forward that made an infinity or NaN, unlike in float32."""
        expected = {key_of(found) for found in self.base.operators["nonfinite"]}
        for found in self.outcomes[precision].operators.get("nonfinite", []):
            if found["phase"] == FORWARD and key_of(found) not in expected:
                return dict(found)
        return None

    def candidates(self, precision: Precision) -> list[str]:
        """Return modules that may have to stay in float32."""
        if self.base.data["compiled"]:  # nothing can be kept in float32 there
            return []
        culprit = self.culprit(precision)
        names = [self.deviations[precision].first_module]
        if culprit is not None:
            names.insert(0, culprit["module"])
        roots = {*self.base.data["roots"], ""}
        return [name for name in names if name not in roots and not precision.keeps(name)][:1]


def times_of(outcome: Outcome) -> dict[str, object]:
    """Return the measured times."""
    return {name: outcome.data[name] for name in ("seconds", "input_seconds")}


def limit_for(noise: float) -> float:
    """Return how far gradients may be from those in float32."""
    return min(MOST, max(LEAST, PART_OF_NOISE * noise))


def key_of(found: dict[str, str]) -> tuple[str, str, str]:
    """Return what identifies an operator of a program."""
    return found["phase"], found["module"], found["operator"]


def without_zeros(exponents: dict[int, int]) -> dict[int, int]:
    """Return the numbers of values that are not zero, by exponent."""
    return {exponent: count for exponent, count in exponents.items() if exponent > ZERO}


def underflow(exponents: dict[int, int], scale: float = 1.0) -> float:
    """Return the share of gradients that float16 rounds to zero."""
    shift = math.log2(scale)
    present = without_zeros(exponents)
    lost = sum(count for exponent, count in present.items() if exponent + shift < SMALLEST - 1)
    return lost / sum(present.values()) if present else 0.0


def largest_scale(exponents: dict[int, int]) -> float:
    """Return the largest scale from 1 to 65536 by which no gradient overflows in float16."""
    present = without_zeros(exponents)
    return 2.0 ** max(0, min(16, LARGEST - 1 - max(present, default=-2)))
