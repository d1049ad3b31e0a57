"""Tries a program in all precisions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampfuse.tools.precision.judge import Judge
from ampfuse.tools.precision.outcome import Outcome, Program, kind_of, run
from ampfuse.tools.precision.precisions import (
    ANALYSED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UNSCALED,
    WEIGHTS,
    Precision,
)
from ampfuse.tools.precision.verdict import Verdict, verdict

MOST_KEPT = 3  # modules that are kept in float32, one after the other
MUCH_BETTER = 0.8  # of the deviation before, or another module is not tried
SLOW = 3.0  # times the time of float32, after which a run ends early


class NoAdviceError(Exception):
    """The program cannot be advised; the message gives the reason."""


@dataclass(frozen=True)
class Advice:
    """The outcomes of a program in all precisions, and what follows."""

    judge: Judge
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return it as dicts and lists, for JSON."""
        return {
            "precision": self.verdict.precision.name,
            "kept": list(self.verdict.precision.kept),
            "sentences": self.verdict.sentences,
            "lines": self.verdict.lines,
            "noise": self.judge.noise,
            "outcomes": [
                {
                    "precision": outcome.precision.name,
                    "kept": list(outcome.precision.kept),
                    "failure": outcome.failure,
                    "gradient_deviation": deviation.gradient if deviation else 0.0,
                    "loss_deviation": deviation.loss if deviation else 0.0,
                    "modules": deviation.kinds if deviation else {},
                    **outcome.data,
                }
                for outcome in (self.judge.base, *self.judge.outcomes.values())
                for deviation in [self.judge.deviations.get(outcome.precision)]
            ],
        }


def advise(program: Program, say: Callable[[str], None]) -> Advice:
    """Run a program in all precisions, and judge them. `say` gets a line before each run."""
    say("running it in float32")
    base = run(program, FLOAT32)
    refuse_unless_usable(base)
    judge = Judge(base)
    if not base.is_finite:
        return Advice(judge, verdict(judge))
    backwards = len(base.losses)
    slowest = SLOW * (base.milliseconds or math.inf)

    def attempt(precision: Precision, most: int = backwards) -> Outcome:
        kept = f", with {', '.join(precision.kept)} in float32" if precision.kept else ""
        say(f"running it in {precision.name}{kept}")
        return run(program, precision, min(most, backwards), judge.scale, slowest)

    judge.add(attempt(BFLOAT16))
    judge.add(attempt(FLOAT16))
    judge.add(attempt(UNSCALED, ANALYSED))
    if base.data["optimizer"]:  # of those that have 16-bit weights
        judge.add(attempt(WEIGHTS))
    for precision in (BFLOAT16, FLOAT16):
        if judge.best() is None and not judge.is_accurate(precision):
            keep_modules(judge, precision, attempt)
    if contenders := judge.contenders():
        say("running the fastest again, to compare times")
        judge.run_again(run(program, FLOAT32))
    for precision in contenders:
        judge.run_again(run(program, precision, backwards, judge.scale))
    return Advice(judge, verdict(judge))


def refuse_unless_usable(base: Outcome) -> None:
    """Raise NoAdviceError if nothing can be compared with this outcome in float32."""
    if base.failure is not None:
        raise NoAdviceError(f"the program fails in float32: {base.failure}")
    if base.data["error"]:
        raise NoAdviceError(f"measuring has failed: {base.data['error']}")
    if not base.losses:
        raise NoAdviceError("the program ended without a call of backward")
    if base.data["steps"] == 0:
        raise NoAdviceError("the program ended without a step of an optimizer of torch.optim")
    if base.data["inputs"] is None:
        raise NoAdviceError("the main thread of the program called no torch.nn.Module")
    if not any(base.gradients):
        raise NoAdviceError(
            "there are no gradients after backward; does an optimizer step inside it?"
        )
    others = set(base.data["dtypes"]) - {"torch.float32"}
    if others:
        raise NoAdviceError(f"expected a program with float32 parameters, got {min(others)}")


def keep_modules(
    judge: Judge, precision: Precision, attempt: Callable[[Precision], Outcome]
) -> None:
    """Look for modules that have to stay in float32."""
    while not judge.is_accurate(precision) and len(precision.kept) < MOST_KEPT:
        modules = judge.candidates(precision)
        if not modules:
            break
        before, limit = precision, MUCH_BETTER * gradient_of(judge, precision)
        precision = before.keeping(modules)
        judge.add(attempt(precision))
        if before.kept:
            judge.drop(before)
        if not judge.deviations[precision].gradient <= limit:
            break
    if precision.kept and not judge.is_accurate(precision):
        judge.drop(precision)
        kinds = map(kind_of, precision.kept)
        judge.in_vain += [kind for kind in kinds if kind not in judge.in_vain]


def gradient_of(judge: Judge, precision: Precision) -> float:
    """Return the deviation of the gradient, or infinity if it is NaN."""
    gradient = judge.deviations[precision].gradient
    return math.inf if math.isnan(gradient) else gradient
