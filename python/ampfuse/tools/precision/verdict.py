"""Explains what the outcomes of a program in several precisions mean, and what to change."""

import math
from dataclasses import dataclass

from ampfuse._texts import percent, size_text
from ampfuse.tools.precision.judge import Judge, find_rising_losses, saves_memory
from ampfuse.tools.precision.outcome import (
    BFLOAT16,
    FIRST_SCALE,
    FLOAT32,
    Outcome,
    Precision,
    kind_of,
)


@dataclass(frozen=True)
class Verdict:
    """The precision that suits a program, and why."""

    judge: Judge
    precision: Precision
    sentences: list[str]
    lines: list[str]
    """The lines to change."""


def verdict(judge: Judge) -> Verdict:
    """Return what the outcomes of all precisions mean."""
    base = judge.base
    if not base.is_finite:
        number = next((i for i, loss in enumerate(base.losses, 1) if not math.isfinite(loss)), None)
        what = "a gradient"
        if number is not None:  # a step may have several losses
            what = f"the loss of step {math.ceil(number * base.steps / len(base.losses))}"
        sentences = [
            f"Stay with float32 for now: {what} is not finite even in float32.",
            "Look at the learning rate, at the data and at the loss.",
        ]
        return Verdict(judge, FLOAT32, sentences, [])
    if not all(one.is_comparable for one in judge.deviations.values()):
        sentences = [
            "These runs cannot be compared: their first batches or weights are not the same.",
            "Draw random numbers from torch, numpy or random, which are seeded here, or seed them.",
        ]
        return Verdict(judge, FLOAT32, sentences, [])
    best, fastest = judge.best(), judge.fastest()
    if best is not None:
        sentences = [explain_gain(judge, best), state_accuracy(judge, best)]
    elif fastest is not None:
        sentences = [explain_no_gain(judge, fastest), state_accuracy(judge, fastest)]
    else:
        sentences = ["Stay with float32: no precision is accurate enough."]
        if not judge.outcomes[BFLOAT16].failure:
            sentences.append(name_origin(judge))
    if "float32" in base.places:
        sentences.append(f"This part of the program stayed in float32: {base.places['float32']}.")
    if losses := find_rising_losses(base.losses):
        rise = f"The loss rises in float32, from about {losses[0]:.3g} to {losses[1]:.3g}: "
        sentences.insert(0, f"{rise}lower the learning rate, and run this again.")
    sentences += [
        f"Do not use {one}: {trouble}."
        for one in judge.outcomes
        if not one.kept and (trouble := judge.trouble(one))
    ]
    best = best or FLOAT32
    return Verdict(judge, best, sentences, lines_to_change(base, best, judge.scale))


def explain_gain(judge: Judge, best: Precision) -> str:
    """Explain what a precision gains."""
    outcome, base = judge.outcomes[best], judge.base
    text = (
        f"Use {best}: a step takes {outcome.milliseconds:,.1f} ms in place of "
        f"{base.milliseconds:,.1f}, so it is {1 / judge.time_ratio(best):.2f} times as fast"
    )
    if saves_memory(outcome, base) and outcome.peak and base.peak:
        text += f", and takes {size_text(outcome.peak)} in place of {size_text(base.peak)}"
    return f"{text}."


def explain_no_gain(judge: Judge, fastest: Precision) -> str:
    """Explain that no precision pays off."""
    outcome, base = judge.outcomes[fastest], judge.base
    if outcome.milliseconds is None or base.milliseconds is None:
        return "Stay with float32: there were too few steps to measure a gain."
    times = f"{outcome.milliseconds:,.1f} ms in place of {base.milliseconds:,.1f} for a step"
    gain = 1 - judge.time_ratio(fastest)
    saved = f"only {percent(gain)}" if gain > 0 else "no time"
    return f"Stay with float32: {fastest} saves {saved} ({times})."


def state_accuracy(judge: Judge, precision: Precision) -> str:
    """State how accurate a precision is, and what has to stay in float32."""
    by = percent(judge.deviations[precision].gradient)
    kept = " and ".join(f"`{kind_of(name)}`" for name in precision.kept)
    stays = f"{kept} has to stay in float32" if kept else "no module has to stay in float32"
    needs = "a scaler is needed" if precision.is_scaled else "no scaler is needed"
    return f"Gradients differ from float32's by {by}, {needs}, and {stays}."


def name_origin(judge: Judge) -> str:
    """Name the module in which the deviation begins."""
    kept = {f"`{kind_of(name)}`": None for one in judge.outcomes for name in one.kept}
    if kept:
        return f"It did not help to keep {', '.join(kept)} in float32."
    module = judge.deviations[BFLOAT16].first_module
    where = f"in `{module}`" if module else "in the loss, since the outputs of all modules agree"
    return f"The deviation in bfloat16 begins {where}."


def lines_to_change(base: Outcome, precision: Precision, scale: float) -> list[str]:
    """Return instructions, each with the line of the program that it is about."""
    places = base.places
    # An expression of the program, for example of its own option, stays as it is.
    device = '"cuda"' if base.gpu else '"cpu"'
    device = "<device of autocast>" if base.autocasts else device
    dtype = str(precision.dtype)
    model = places.get("model", "the program")
    lines = []
    if precision.dtype is None:
        lines += [f"{line}: add enabled=False" for line in base.autocasts]
    elif base.autocasts:
        others = [line for line, own in base.autocasts.items() if own != dtype]
        lines += [f"{line}: pass dtype={dtype}, and leave its device" for line in others]
    elif "off" in places:
        lines.append(f"{places['off']}: enable it for {device}, with dtype={dtype}")
    else:
        context = f"`with torch.autocast({device}, dtype={dtype}):`"
        lines.append(f"{model}: put it and the loss, but not backward(), into {context}")
    if precision.is_scaled and "scaler" not in places:
        first = "" if scale == FIRST_SCALE else f", init_scale={scale:.0f}"
        lines += [
            f"before the loop: `scaler = torch.amp.GradScaler({device}{first})`",
            f"{places['backward']}: `scaler.scale(loss).backward()`",
            f"{places['step']}: `scaler.step(optimizer)`, then `scaler.update()`",
            "before gradients are clipped, if they are: `scaler.unscale_(optimizer)`",
        ]
    elif not precision.is_scaled and "scaler" in places:
        lines.append(f"{places['scaler']}: add enabled=False")
    for name in precision.kept:
        lines.append(
            f"around the call of `{name}`: `with torch.autocast({device}, enabled=False):`, "
            "and give it x.float()"
        )
    return lines
