"""Tries a program in all precisions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampfuse.precision._outcome import Program, faster, run
from ampfuse.precision._precisions import (
    ANALYSED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UNSCALED,
    WEIGHTS,
    Precision,
)
from ampfuse.precision._verdict import Judge, Verdict, verdict

MOST_KEPT = 3  # modules that are kept in float32, one after the other


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
                    "modules": deviation.modules if deviation else {},
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
    if base.failure is not None:
        raise NoAdviceError(f"the program fails in float32: {base.failure}")
    if base.data["error"]:
        raise NoAdviceError(f"measuring has failed: {base.data['error']}")
    if base.data["steps"] == 0 or not base.gradients:
        raise NoAdviceError("expected steps of an optimizer and calls of backward, got none")
    if base.data["own_16bit"]:
        raise NoAdviceError(
            f"expected a program with float32 parameters, got {base.data['own_16bit']}"
        )
    judge = Judge(base)
    if not base.is_finite:
        return Advice(judge, verdict(judge))
    backwards = len(base.losses)

    def attempt(precision: Precision, scale: float = 1.0, most: int = backwards) -> None:
        kept = f" with {', '.join(precision.kept)} in float32" if precision.kept else ""
        say(f"running it in {precision.name}{kept}")
        judge.add(run(program, precision, min(most, backwards), scale))

    attempt(BFLOAT16)
    scale = judge.scale
    attempt(FLOAT16, scale)
    attempt(UNSCALED, most=ANALYSED)
    attempt(WEIGHTS)
    if not judge.outcomes[WEIGHTS].data.get("converted", 1):  # there is no Adam
        del judge.outcomes[WEIGHTS], judge.deviations[WEIGHTS]
    for precision in (BFLOAT16, FLOAT16):
        while judge.best() is None and not judge.is_accurate(precision):
            modules = judge.candidates(precision)
            if not modules or len(precision.kept) == MOST_KEPT:
                break
            precision = precision.keeping(modules)
            attempt(precision, scale)
    if contenders := judge.contenders():
        say("running the fastest again, to compare times")
        judge.base = faster(base, run(program, FLOAT32))
    for precision in contenders:
        again = run(program, precision, backwards, scale)
        judge.outcomes[precision] = faster(judge.outcomes[precision], again)
    return Advice(judge, verdict(judge))
