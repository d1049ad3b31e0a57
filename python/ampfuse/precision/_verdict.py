"""Judges the outcomes of a program in several precisions."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ampfuse._texts import size_text
from ampfuse.precision._lines import lines_to_change
from ampfuse.precision._outcome import Deviation, Outcome, noise
from ampfuse.precision._precisions import BFLOAT16, FLOAT16, FLOAT32, UNSCALED, Precision

# Rounding changes gradients. This is too much if it is much beside what another batch changes, or
# if it is much beside the gradient itself. Less than the least does not matter: where all batches
# are the same, 1 % of rounding is still a good gradient.
PART_OF_NOISE = 0.3
LEAST, MOST = 0.05, 0.3
MOST_OF_LOSS = 0.05
FASTER = 0.9  # of the time in float32
NOT_SLOWER = 1.05
CONTENDS = 1.3  # of the least time
SMALLER = 0.85  # of the memory in float32
LEAST_SAVED = 64 * 2**20  # bytes; less may be noise of a process
SMALLEST, LARGEST = -24, 15  # exponents of float16


@dataclass(frozen=True)
class Verdict:
    """The precision that suits a program, and why."""

    precision: Precision
    sentences: list[str]
    lines: list[str]
    """The lines to change."""


class Judge:
    """Compares outcomes with that in float32."""

    def __init__(self, base: Outcome) -> None:
        self.base = base
        self.noise = noise(base)
        self.limit = LEAST if math.isnan(self.noise) else limit_for(self.noise)
        self.outcomes: dict[Precision, Outcome] = {}
        self.deviations: dict[Precision, Deviation] = {}

    @property
    def scale(self) -> float:
        """The largest scale by which no gradient overflows in float16, and 1 if none is known."""
        known = self.outcomes.get(BFLOAT16)
        return 1.0 if known is None or not known.exponents else largest_scale(known.exponents)

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

    def is_accurate(self, precision: Precision) -> bool:
        """Return True if a precision computes about the same as float32."""
        outcome, deviation = self.outcomes.get(precision), self.deviations.get(precision)
        if outcome is None or deviation is None or outcome.failure or not outcome.is_finite:
            return False
        return deviation.gradient <= self.limit and deviation.loss <= MOST_OF_LOSS

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

        Among those that are about as fast as the fastest, the first is the simplest.
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
            if found["phase"] == "forward" and key_of(found) not in expected:
                return dict(found)
        return None

    def candidates(self, precision: Precision) -> list[str]:
        """Return modules that may have to stay in float32."""
        culprit = self.culprit(precision)
        names = [self.deviations[precision].first_module]
        if culprit is not None:
            names.insert(0, culprit["module"])
        is_known = {*self.base.data["roots"], *precision.kept, ""}
        return [name for name in names if name not in is_known][:1]


def limit_for(noise: float) -> float:
    """Return how far gradients may be from those in float32."""
    return min(MOST, max(LEAST, PART_OF_NOISE * noise))


def key_of(found: dict[str, str]) -> tuple[str, str, str]:
    """Return what identifies an operator of a program."""
    return found["phase"], found["module"], found["operator"]


def verdict(judge: Judge) -> Verdict:
    """Return what the outcomes of all precisions mean."""
    base = judge.base
    if not base.is_finite:
        number = next((i for i, loss in enumerate(base.losses, 1) if not math.isfinite(loss)), None)
        what = f"the loss of backward {number}" if number else "a gradient"
        sentences = [
            f"Stay with float32 for now: {what} is not finite even so.",
            "Other precisions cannot be judged before that is mended.",
            "Look at the learning rate, at the data and at the loss.",
        ]
        return Verdict(FLOAT32, sentences, [])
    if not judge.is_comparable:
        sentences = [
            "These runs cannot be compared: their first batches or weights are not the same.",
            "Draw random numbers from torch, numpy or random, which are seeded here, or seed them.",
            "Times and memory are right even so.",
        ]
        return Verdict(FLOAT32, sentences, [])
    best = judge.best()
    if best is not None:
        sentences = [use(judge, best), accuracy(judge, best), about_others(judge, best)]
        return Verdict(best, sentences, lines_to_change(base, best, judge.scale))
    fastest = judge.fastest()
    if fastest is not None:
        sentences = [no_gain(judge, fastest), reason(judge, fastest), accuracy(judge, fastest)]
    else:
        sentences = [
            "Stay with float32: 16 bits are not accurate enough for this program.",
            inaccuracy(judge),
            origin(judge),
        ]
    return Verdict(FLOAT32, sentences, lines_to_change(base, FLOAT32, 1.0))


def use(judge: Judge, best: Precision) -> str:
    """Return a sentence about what a precision gains."""
    outcome, base = judge.outcomes[best], judge.base
    assert outcome.milliseconds is not None
    assert base.milliseconds is not None
    ratio = base.milliseconds / outcome.milliseconds
    text = (
        f"Use {name_of(best)}: a step takes {outcome.milliseconds:,.1f} ms in place of "
        f"{base.milliseconds:,.1f}, so it is {ratio:.2f} times as fast"
    )
    if judge.saves_memory(outcome, base) and outcome.peak and base.peak:
        text += f", and takes {size_text(outcome.peak)} in place of {size_text(base.peak)}"
    return f"{text}."


def name_of(precision: Precision) -> str:
    """Return what a user would call a precision."""
    kind = precision.dtype_name
    if precision.has_16bit_weights:
        return f"{kind} weights with float32 masters"
    return f"{kind} with a scaler" if precision.is_scaled else kind


def accuracy(judge: Judge, precision: Precision) -> str:
    """Return a sentence about the accuracy of a precision, and about what it needs."""
    differences = f"Its gradients differ from float32's by {of(judge, precision)}"
    if not math.isnan(judge.noise):
        differences += f" (those of two batches differ by {percent(judge.noise)})"
    needs = about_scaler(judge) if precision.is_scaled else "it needs no scaler"
    kept = " and ".join(f"`{name}`" for name in precision.kept)
    stays = f"{kept} has to stay in float32" if kept else "nothing has to stay in float32"
    return f"{differences}, {needs}, and {stays}."


def of(judge: Judge, precision: Precision) -> str:
    """Return the deviation of a precision's gradients."""
    return percent(judge.deviations[precision].gradient)


def about_scaler(judge: Judge) -> str:
    """Return why float16 needs a scaler."""
    if UNSCALED not in judge.outcomes or judge.outcomes[UNSCALED].failure:
        return "it needs a scaler"
    if judge.is_accurate(UNSCALED):
        return "it needs a scaler later at least, when gradients are smaller"
    return f"it needs a scaler (without one they differ by {of(judge, UNSCALED)})"


def about_others(judge: Judge, best: Precision) -> str:
    """Return a sentence about the other kind of 16 bits."""
    other = FLOAT16 if best.dtype == torch.bfloat16 else BFLOAT16
    if other not in judge.outcomes:
        return ""
    if not judge.is_accurate(other):
        return f"{name_of(other).capitalize()} is no alternative: {trouble(judge, other)}."
    time = judge.outcomes[other].milliseconds or math.nan
    return f"{name_of(other).capitalize()} would be accurate enough, too, and take {time:,.1f} ms."


def trouble(judge: Judge, precision: Precision) -> str:
    """Return what is wrong with a precision, as a clause."""
    outcome, deviation = judge.outcomes[precision], judge.deviations[precision]
    if outcome.failure:
        return f"the program fails with {outcome.failure}"
    culprit = judge.culprit(precision)
    if culprit is not None:
        where = f" ({culprit['where']})" if culprit["where"] else ""
        module = f" of `{culprit['module']}`" if culprit["module"] else ""
        return f"`{culprit['operator']}`{module}{where} is the first operator that overflows"
    if not outcome.is_finite:
        return "its gradients are not finite"
    return (
        f"its gradients differ from float32's by {percent(deviation.gradient)}, and its loss by "
        f"{percent(deviation.loss)}"
    )


def inaccuracy(judge: Judge) -> str:
    """Return a sentence about why no precision is accurate enough."""
    found = [f"in {one.dtype_name} {trouble(judge, one)}" for one in (BFLOAT16, FLOAT16)]
    text = "; ".join(found)
    return f"{text[0].upper()}{text[1:]}."


def origin(judge: Judge) -> str:
    """Return a sentence about where a deviation begins."""
    module = judge.deviations[BFLOAT16].first_module if BFLOAT16 in judge.outcomes else ""
    tried = sorted({name for one in judge.outcomes for name in one.kept})
    if tried:
        names = ", ".join(f"`{name}`" for name in tried)
        return f"To keep {names} in float32 alone is not enough."
    if module in judge.base.data["roots"]:
        return f"What `{module}` computes between its modules is the first that is not the same."
    if module:
        return f"`{module}` is the first module whose output is not the same."
    return "The outputs of all modules are about the same, so what follows them is too sensitive."


def no_gain(judge: Judge, fastest: Precision) -> str:
    """Return a sentence about times that do not pay."""
    outcome, base = judge.outcomes[fastest], judge.base
    if outcome.milliseconds is None or base.milliseconds is None:
        return "Stay with float32: there were too few steps to measure a gain."
    return (
        f"Stay with float32: a step takes {base.milliseconds:,.1f} ms, and "
        f"{outcome.milliseconds:,.1f} ms in {name_of(fastest)}."
    )


def reason(judge: Judge, fastest: Precision) -> str:
    """Return a sentence about why 16 bits do not pay."""
    base, outcome = judge.base, judge.outcomes[fastest]
    waits = share_of_input(base)
    if waits > 0.3:
        return f"{percent(waits)} of a step waits for input, which no precision changes."
    busy = share_of_operators(base)
    if busy < 0.5:
        return (
            f"The operators of forward and backward take only {percent(busy)} of a step; the rest "
            "is the same in all precisions."
        )
    if why := missing_instructions(base, fastest):
        return why
    seconds = outcome.operators["seconds"]
    casts = seconds.get("casts", 0.0) / sum(seconds.values())
    if casts > 0.1:
        return f"The operators are small: casts take {percent(casts)} of their time."
    still = seconds.get("float32", 0.0) / sum(seconds.values())
    if still > 0.5:
        return f"Operators that autocast leaves in float32 take {percent(still)} of their time."
    return "The operators of this program are not faster in 16 bits here."


def share_of_input(outcome: Outcome) -> float:
    """Return the share of a step that waits for input."""
    whole = sum(outcome.data["seconds"])
    return float(sum(outcome.data["input_seconds"]) / whole) if whole else 0.0


def share_of_operators(outcome: Outcome) -> float:
    """Return the share of a step in which the operators of forward and backward run."""
    if not outcome.milliseconds or not outcome.gradients:
        return 1.0
    seconds: dict[str, float] = outcome.operators["seconds"]
    each = sum(seconds.values()) / len(outcome.gradients)
    steps: int = outcome.data["steps"]
    per_step = each * len(outcome.losses) / max(1, steps)
    return min(1.0, 1e3 * per_step / outcome.milliseconds)


def missing_instructions(base: Outcome, precision: Precision) -> str:
    """Return a sentence if the device computes in 16 bits by other instructions."""
    name = precision.dtype_name
    is_bf16 = precision.dtype == torch.bfloat16
    if base.data["gpu"]:
        if base.data["capability"] < ([8, 0] if is_bf16 else [7, 0]):
            return f"{base.data['gpu']} has no fast products in {name}."
        return ""
    abilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    needed = ("avx512_bf16", "amx_bf16") if is_bf16 else ("avx512_fp16", "amx_fp16")
    if abilities.get("architecture") == "x86_64" and not any(map(abilities.get, needed)):
        return f"This CPU has no instructions for products in {name}."
    return ""


def underflow(exponents: dict[int, int], scale: float = 1.0) -> float:
    """Return the share of gradients that float16 rounds to zero."""
    shift = math.log2(scale)
    present = {exponent: count for exponent, count in exponents.items() if exponent > -150}
    lost = sum(count for exponent, count in present.items() if exponent + shift < SMALLEST - 1)
    return lost / sum(present.values()) if present else 0.0


def largest_scale(exponents: dict[int, int]) -> float:
    """Return the largest scale from 1 to 65536 by which no gradient overflows in float16."""
    present = [exponent for exponent in exponents if exponent > -150]
    return 2.0 ** max(0, min(16, LARGEST - 1 - max(present, default=-2)))


def percent(share: float) -> str:
    """Return a share as a text with two digits, as in `"0.35 %"`."""
    if not math.isfinite(share):
        return "an unknown amount"
    digits = max(0, 1 - math.floor(math.log10(100 * share))) if share > 0 else 0
    return f"{100 * share:,.{min(digits, 4)}f} %"
