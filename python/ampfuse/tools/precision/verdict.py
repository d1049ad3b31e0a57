"""Judges the outcomes of a program in several precisions."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ampfuse._texts import size_text
from ampfuse.tools.precision.judge import NOT_SLOWER, VARIES, Judge
from ampfuse.tools.precision.lines import lines_to_change
from ampfuse.tools.precision.outcome import Outcome, kind_of
from ampfuse.tools.precision.precisions import BFLOAT16, FLOAT16, FLOAT32, UNSCALED, Precision


@dataclass(frozen=True)
class Verdict:
    """The precision that suits a program, and why."""

    precision: Precision
    sentences: list[str]
    lines: list[str]
    """The lines to change."""


def verdict(judge: Judge) -> Verdict:
    """Return what the outcomes of all precisions mean."""
    base = judge.base
    if not base.is_finite:
        number = next((i for i, loss in enumerate(base.losses, 1) if not math.isfinite(loss)), None)
        what = f"the loss of backward {number}" if number else "a gradient"
        sentences = [
            f"Stay with float32 for now: {what} is not finite even in float32.",
            "Other precisions cannot be judged before that is fixed.",
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
        sentences = [use(judge, best), accuracy(judge, best), compare_other_dtype(judge, best)]
        return Verdict(best, sentences, lines_to_change(base, best, judge.scale))
    fastest = judge.fastest()
    if fastest is not None:
        sentences = [no_gain(judge, fastest), reason(judge, fastest), accuracy(judge, fastest)]
    else:
        fails = all(one.failure for one in judge.outcomes.values())
        inaccurate = "16 bits are not accurate enough for this program"
        why = "the program fails in 16 bits" if fails else inaccurate
        sentences = [f"Stay with float32: {why}.", inaccuracy(judge)]
        if judge.outcomes[BFLOAT16].failure is None:
            sentences.append(origin(judge))
    return Verdict(FLOAT32, sentences, lines_to_change(base, FLOAT32, 1.0))


def use(judge: Judge, best: Precision) -> str:
    """Explain what a precision gains."""
    outcome, base = judge.outcomes[best], judge.base
    assert outcome.milliseconds is not None
    assert base.milliseconds is not None
    ratio = base.milliseconds / outcome.milliseconds
    unsure = ", if a run on a quiet machine confirms it" if judge.spread > VARIES else ""
    text = (
        f"Use {name_of(best)}{unsure}: a step takes {outcome.milliseconds:,.1f} ms in place of "
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
    """State how accurate a precision is, and what it needs."""
    by = deviation_of(judge, precision)
    differences = f"In {name_of(precision)}, gradients differ from float32's by {by}"
    needs = explain_scaler(judge) if precision.is_scaled else "no scaler is needed"
    kept = " and ".join(f"`{kind_of(name)}`" for name in precision.kept)
    stays = f"{kept} has to stay in float32" if kept else "no module has to stay in float32"
    return f"{differences}, {needs}, and {stays}."


def deviation_of(judge: Judge, precision: Precision) -> str:
    """Return the deviation of a precision's gradients."""
    return percent(judge.deviations[precision].gradient)


def explain_scaler(judge: Judge) -> str:
    """Return why float16 needs a scaler."""
    if UNSCALED not in judge.outcomes or judge.outcomes[UNSCALED].failure:
        return "a scaler is needed"
    if judge.is_accurate(UNSCALED):
        return "a scaler is needed later at least, when gradients are smaller"
    return f"a scaler is needed (without one they differ by {deviation_of(judge, UNSCALED)})"


def compare_other_dtype(judge: Judge, best: Precision) -> str:
    """Compare with the other 16-bit dtype."""
    other = FLOAT16 if best.dtype == torch.bfloat16 else BFLOAT16
    if other not in judge.outcomes:
        return ""
    if not judge.is_accurate(other):
        return f"{name_of(other).capitalize()} is no alternative: {trouble(judge, other)}."
    ratio = judge.time_ratio(judge.outcomes[other]) / judge.time_ratio(judge.outcomes[best])
    text = f"{name_of(other).capitalize()} would be accurate enough, too"
    if ratio > NOT_SLOWER:
        return f"{text}, but a step would take {ratio:.1f} times as long."
    return f"{text}."


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
    text = f"its gradients differ from float32's by {percent(deviation.gradient)}"
    far = judge.far_module(precision)
    if deviation.gradient <= judge.limit and far is not None:
        return f"{text}, but those of `{far[0]}` by {percent(far[1])}"
    return f"{text}, and its loss by {percent(deviation.loss)}"


def inaccuracy(judge: Judge) -> str:
    """Explain why no precision is accurate enough."""
    found = [f"in {one.dtype_name} {trouble(judge, one)}" for one in (BFLOAT16, FLOAT16)]
    text = "; ".join(found)
    return f"{text[0].upper()}{text[1:]}."


def origin(judge: Judge) -> str:
    """Name the module in which the deviation begins."""
    if judge.in_vain:
        names = ", ".join(f"`{kind}`" for kind in judge.in_vain)
        return f"It did not help to keep {names} in float32."
    module = judge.deviations[BFLOAT16].first_module
    if module in judge.base.data["roots"]:
        return f"The deviation begins in `{module}` itself, not in a submodule."
    if module:
        return f"The deviation begins in `{module}`, whose output is the first that differs."
    return "The outputs of all modules agree, so the deviation begins in the loss."


def no_gain(judge: Judge, fastest: Precision) -> str:
    """Explain why no precision pays off."""
    outcome, base = judge.outcomes[fastest], judge.base
    if outcome.milliseconds is None or base.milliseconds is None:
        return "Stay with float32: there were too few steps to measure a gain."
    times = f"{outcome.milliseconds:,.1f} ms in place of {base.milliseconds:,.1f} for a step"
    gain = 1 - judge.time_ratio(outcome)
    if gain > 0:
        return f"Stay with float32: {name_of(fastest)} saves only {percent(gain)} ({times})."
    return f"Stay with float32: {name_of(fastest)} saves no time ({times})."


def reason(judge: Judge, fastest: Precision) -> str:
    """Explain why 16 bits are not faster."""
    base = judge.base
    waits = share_of_input(base)
    if waits > 0.3:
        return f"{percent(waits)} of a step waits for input, which no precision changes."
    if why := missing_instructions(base, fastest):
        return why
    return "Most of a step is spent elsewhere, or in operators that autocast leaves in float32."


def share_of_input(outcome: Outcome) -> float:
    """Return the share of a step that waits for input."""
    whole = sum(outcome.data["seconds"])
    return float(sum(outcome.data["input_seconds"]) / whole) if whole else 0.0


def missing_instructions(base: Outcome, precision: Precision) -> str:
    """Return a sentence if the device has no instructions for products in this dtype."""
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


def percent(share: float) -> str:
    """Return a share as a text with two digits, as in `"0.35 %"`."""
    if not math.isfinite(share):
        return "an unknown amount"
    if share > 10:
        return "> 1,000 %"
    if 0 < share < 1e-6:
        return "< 0.0001 %"
    digits = max(0, 1 - math.floor(math.log10(100 * share))) if share > 0 else 0
    return f"{100 * share:,.{min(digits, 4)}f} %"
