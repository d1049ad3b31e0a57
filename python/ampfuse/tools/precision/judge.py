"""Judges which precisions are accurate, and which are worth it."""

import math
from statistics import median

from ampfuse._texts import percent
from ampfuse.tools.precision.deviation import Deviation, measure_noise
from ampfuse.tools.precision.outcome import (
    BFLOAT16,
    FIRST_SCALE,
    UNSCALED,
    Outcome,
    Overflow,
    Precision,
)

# The limit of a gradient's deviation is 30 % of the distance between the gradients of two batches,
# but at least 5 %, since all batches may be the same, and at most 30 % of the gradient.
PART_OF_NOISE = 0.3
LEAST, MOST = 0.05, 0.3
MOST_OF_LOSS = 0.05
MOST_OF_MODULE = 0.3  # of the gradient of one module
WORSE = 0.25  # of the last losses in float32
RISES = 2.0  # times the first losses in float32
FASTER = 0.9  # of the time in float32
NOT_SLOWER = 1.05
CONTENDS = 2.0  # times the least time
SMALLER = 0.85  # of the memory in float32
LEAST_SAVED = 64 * 2**20  # bytes; less may be noise of a process
LARGEST = 15  # exponent of float16


class Judge:
    """Compares outcomes with that in float32."""

    def __init__(self, base: Outcome) -> None:
        self.base = base
        self.noise = measure_noise(base)
        self.limit = min(MOST, max(LEAST, PART_OF_NOISE * self.noise))
        self.outcomes: dict[Precision, Outcome] = {}
        self.deviations: dict[Precision, Deviation] = {}

    @property
    def scale(self) -> float:
        """The largest scale up to 65536 by which no gradient overflows in float16."""
        known = self.outcomes.get(BFLOAT16)
        return FIRST_SCALE if known is None else largest_scale(known.largest_in_backward)

    def add(self, outcome: Outcome) -> None:
        """Add an outcome in another precision."""
        self.outcomes[outcome.precision] = outcome
        self.deviations[outcome.precision] = Deviation(self.base, outcome)

    def run_again(self, outcome: Outcome) -> None:
        """Add a second outcome in a precision. The faster one counts for times.

        Other work of the machine makes a run slower, but none makes it faster.
        """
        first = self.outcomes.get(outcome.precision, self.base)
        if (outcome.milliseconds or math.inf) < (first.milliseconds or 0.0):
            first.seconds = outcome.seconds

    def trouble(self, precision: Precision) -> str:
        """Return what is wrong with a precision, as a clause; an empty text if it is accurate."""
        outcome, deviation = self.outcomes[precision], self.deviations[precision]
        if outcome.failure:
            return f"the program fails with {outcome.failure}"
        text = f"gradients differ from float32's by {percent(deviation.gradient)}"
        if not outcome.is_finite:
            found = "gradients are not finite"
        elif deviation.gradient > self.limit:
            found = text
        elif (worst := max(deviation.modules.values(), default=0.0)) > MOST_OF_MODULE:
            found = f"{text}, but those of `{next(iter(deviation.modules))}` by {percent(worst)}"
        elif deviation.loss > MOST_OF_LOSS:
            found = f"{text}, and the loss by {percent(deviation.loss)}"
        elif losses := find_worse_losses(self.base.losses, outcome.losses):
            found = f"last losses are about {losses[0]:.3g} in place of {losses[1]:.3g}"
        else:
            return ""
        culprit = self.culprit(precision)
        if culprit is None:
            return found
        where = f" ({culprit.where})" if culprit.where else ""
        module = f" of `{culprit.module}`" if culprit.module else ""
        return f"`{culprit.operator}`{module}{where} is the first operator that overflows"

    @property
    def accurate(self) -> list[Precision]:
        """The precisions that compute about the same as float32, and that may be advised."""
        return [one for one in self.outcomes if one != UNSCALED and not self.trouble(one)]

    def is_worth_it(self, precision: Precision) -> bool:
        """Return True if a precision saves time, or memory without taking more time."""
        speed = self.time_ratio(precision)
        is_smaller = saves_memory(self.outcomes[precision], self.base)
        return speed <= FASTER or (speed <= NOT_SLOWER and is_smaller)

    def time_ratio(self, precision: Precision) -> float:
        """Return the time of a step relative to that in float32."""
        time, base = self.outcomes[precision].milliseconds, self.base.milliseconds
        return time / base if time and base else math.inf

    def best(self) -> Precision | None:
        """Return the best precision that is accurate and worth it, or None.

        Several may be about as fast as the fastest. The first of them is returned, the simplest.
        """
        able = [one for one in self.accurate if self.is_worth_it(one)]
        least = min(map(self.time_ratio, able), default=math.inf)
        return next((one for one in able if self.time_ratio(one) <= NOT_SLOWER * least), None)

    def fastest(self) -> Precision | None:
        """Return the fastest precision that is accurate, or None."""
        return min(self.accurate, key=self.time_ratio, default=None)

    def contenders(self) -> list[Precision]:
        """Return the precisions that may be the fastest accurate one."""
        able = self.accurate
        least = min(map(self.time_ratio, able), default=math.inf)
        return [one for one in able if self.time_ratio(one) <= CONTENDS * least]

    def culprit(self, precision: Precision) -> Overflow | None:
        """Return the first operator of forward that made an infinity or NaN, unlike in float32."""
        expected = {found[:2] for found in self.base.overflows}
        for found in self.outcomes[precision].overflows:
            if found[:2] not in expected:
                return found
        return None

    def suspect(self, precision: Precision) -> str | None:
        """Return a module that may have to stay in float32, or None."""
        if self.base.is_compiled:  # nothing can be kept in float32 there
            return None
        culprit = self.culprit(precision)
        names = [culprit.module] if culprit else []
        names.append(self.deviations[precision].first_module)
        roots = {*self.base.roots, ""}
        able = (name for name in names if name not in roots and not precision.keeps(name))
        return next(able, None)


def find_worse_losses(base: list[float], other: list[float]) -> tuple[float, float] | None:
    """Return about the last losses of a run and in float32 if the first are much higher, or None.

    Batches are the same, so losses are compared one by one. A run that ended early is not compared.
    """
    count = len(base) // 4
    if len(other) != len(base) or not count:
        return None
    got, expected = other[-count:], base[-count:]
    worse = median(a - b for a, b in zip(got, expected, strict=True))
    is_worse = worse > WORSE * median(map(abs, expected))
    return (median(got), median(expected)) if is_worse else None


def find_rising_losses(losses: list[float]) -> tuple[float, float] | None:
    """Return about the first and the last losses if these are a multiple of those; else None."""
    if not (count := len(losses) // 4):
        return None
    first, second = median(losses[:count]), median(losses[count : 2 * count])
    last = median(losses[-count:])
    return (first, last) if last > max(RISES * first, second) and first > 0 else None


def saves_memory(outcome: Outcome, other: Outcome) -> bool:
    """Return True if an outcome takes clearly less memory than another one."""
    if outcome.peak is None or other.peak is None:
        return False
    return outcome.peak <= min(SMALLER * other.peak, other.peak - LEAST_SAVED)


def largest_scale(gradient: float) -> float:
    """Return the largest scale from 1 to 65536 by which this gradient does not overflow."""
    exponent = math.frexp(gradient)[1] if gradient else -1
    return min(FIRST_SCALE, 2.0 ** max(0, LARGEST - exponent))
