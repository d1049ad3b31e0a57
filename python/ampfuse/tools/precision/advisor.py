"""Tries a program in all precisions."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ampfuse.tools.precision.judge import Judge
from ampfuse.tools.precision.outcome import (
    ANALYSED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UNSCALED,
    Outcome,
    Precision,
)
from ampfuse.tools.precision.trial import Program
from ampfuse.tools.precision.verdict import Verdict, verdict

MOST_KEPT = 3  # modules that are kept in float32, one after the other
MUCH_BETTER = 0.8  # of the deviation before, or another module is not tried
SLOW = 3.0  # times the time of float32, after which a run ends early


class NoAdviceError(Exception):
    """The program cannot be advised; the message gives the reason."""


def advise(program: Program, say: Callable[[str], None]) -> Verdict:
    """Run a program in all precisions, and judge them. `say` gets a line before each run."""
    say("running it in float32")
    base = run(program, FLOAT32)
    refuse_unless_usable(base)
    judge = Judge(base)
    if not base.is_finite:
        return verdict(judge)
    backwards = len(base.losses)
    slowest = SLOW * (base.milliseconds or math.inf)

    def attempt(precision: Precision, most: int = backwards) -> None:
        say(f"running it in {precision}")
        limits = {"backwards": min(most, backwards), "slowest": slowest}
        judge.add(run(program, precision, scale=judge.scale, **limits))

    attempt(BFLOAT16)
    attempt(FLOAT16)
    attempt(UNSCALED, ANALYSED)
    for precision in (BFLOAT16, FLOAT16):
        if judge.best() is None:
            keep_modules(judge, precision, attempt)
    if contenders := judge.contenders():
        say("running the fastest again, to compare times")
        judge.run_again(run(program, FLOAT32))
    for precision in contenders:
        judge.run_again(run(program, precision, scale=judge.scale, backwards=backwards))
    return verdict(judge)


def run(program: Program, precision: Precision, **changes: float) -> Outcome:
    """Run the program in another process, with other limits or another scale."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changed = replace(program, precision=precision, **changes)  # type: ignore[arg-type]
        torch.save(changed, folder / "program.pt")
        command = [sys.executable, "-m", "ampfuse.tools.precision.process", name]
        printed = folder / "printed"  # not a pipe, which the program's children may keep open
        with printed.open("wb") as output:
            nothing = subprocess.DEVNULL
            done = subprocess.run(command, stdin=nothing, stdout=output, stderr=output, check=False)
        if (folder / "outcome.pt").exists():
            outcome: Outcome = torch.load(folder / "outcome.pt", weights_only=False)
            return outcome
        text = printed.read_bytes().decode(errors="replace").strip().rpartition("\n")[2]
        return Outcome(precision, text or f"the process ended with code {done.returncode}")


def refuse_unless_usable(base: Outcome) -> None:
    """Raise NoAdviceError if nothing can be compared with this outcome in float32."""
    if base.failure is not None:
        raise NoAdviceError(f"the program fails in float32: {base.failure}")
    if not base.losses:
        raise NoAdviceError("the program ended without a call of backward")
    if base.steps == 0:
        raise NoAdviceError("the program ended without a step of an optimizer of torch.optim")
    if base.inputs is None:
        raise NoAdviceError("the main thread of the program called no torch.nn.Module")
    if not any(base.gradients):
        raise NoAdviceError("all gradients are 0 or missing after backward")
    others = set(base.dtypes) - {"torch.float32"}
    if others:
        raise NoAdviceError(f"expected a program with float32 parameters, got {min(others)}")


def keep_modules(judge: Judge, precision: Precision, attempt: Callable[[Precision], None]) -> None:
    """Look for modules that have to stay in float32."""
    while judge.trouble(precision) and len(precision.kept) < MOST_KEPT:
        module, before = judge.suspect(precision), judge.deviations[precision]
        if module is None:
            break
        precision = precision.keeping(module)
        attempt(precision)
        if not judge.deviations[precision].gradient < MUCH_BETTER * before.gradient:
            break
