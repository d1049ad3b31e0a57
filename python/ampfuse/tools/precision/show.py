"""Shows advice: as text, and as a picture."""

import math
from pathlib import Path

import torch

from ampfuse._texts import size_text
from ampfuse.tools.precision.advisor import Advice
from ampfuse.tools.precision.judge import (
    VARIES,
    underflow,
)
from ampfuse.tools.precision.outcome import Outcome, kind_of
from ampfuse.tools.precision.precisions import BFLOAT16, FLOAT32, UNSCALED, Precision
from ampfuse.tools.precision.verdict import percent, trouble

MODULES_SHOWN = 5


def text(advice: Advice, program: str) -> str:
    """Return the advice as plain text."""
    lines = [
        f"{program}: {advice.judge.base.data['steps']} steps in each precision, on {device(advice)}"
    ]
    lines += table(advice)
    if rows := details(advice):
        lines += ["", *(f"  {row}" for row in rows)]
    lines += [""] + [sentence for sentence in advice.verdict.sentences if sentence]
    is_done = advice.verdict.precision != FLOAT32
    nothing = "none: the program does this already" if is_done else "none"
    changes = advice.verdict.lines or [nothing]
    lines += ["", "lines to change", *(f"  {line}" for line in changes)]
    return "\n".join(lines)


def device(advice: Advice) -> str:
    """Return the name of the device."""
    gpu = advice.judge.base.data["gpu"]
    return gpu or f"a CPU with {torch.backends.cpu.get_cpu_capability()}"


def table(advice: Advice) -> list[str]:
    """Return a row for each precision."""
    head = ("precision", "step", "memory", "gradients off", "loss off", "skipped", "last loss")
    outcomes = (advice.judge.base, *advice.judge.outcomes.values())
    rows = [head, *(row(advice, outcome) for outcome in outcomes)]
    widths = [max(len(one[column]) for one in rows) for column in range(len(head))]
    first, *rest = widths
    return [
        "  ".join(
            [f"  {one[0]:<{first}}", *(f"{x:>{w}}" for x, w in zip(one[1:], rest, strict=True))]
        )
        for one in rows
    ]


def row(advice: Advice, outcome: Outcome) -> tuple[str, ...]:
    """Return the texts of one row."""
    precision = outcome.precision
    name = name_with_kept(precision)
    if outcome.failure:
        return name, "fails", "", "", "", "", ""
    deviation = advice.judge.deviations.get(precision)
    time = "" if outcome.milliseconds is None else f"{outcome.milliseconds:,.1f} ms"
    memory = memory_text(outcome)
    gradient = loss = ""
    if deviation is not None:
        is_finite = math.isfinite(deviation.gradient)
        gradient = percent(deviation.gradient) if is_finite else "not finite"
        loss = percent(deviation.loss) if math.isfinite(deviation.loss) else "not finite"
    skipped = str(outcome.data["skipped"] or 0) if precision.is_scaled else ""
    is_whole = len(outcome.losses) == len(advice.judge.base.losses)
    last = f"{outcome.losses[-1]:.4g}" if is_whole else ""
    return name, time, memory, gradient, loss, skipped, last


def name_with_kept(precision: Precision) -> str:
    """Return the name of a precision with the modules that stay in float32."""
    kinds = ", ".join(kind_of(name) for name in precision.kept)
    return f"{precision.name}, {kinds} in float32" if kinds else precision.name


def memory_text(outcome: Outcome) -> str:
    """Return the peak of memory, which is known on a GPU only."""
    has_peak = outcome.peak is not None and outcome.precision != UNSCALED
    return size_text(outcome.peak or 0) if has_peak else ""


def details(advice: Advice) -> list[str]:
    """Return lines about gradients and operators."""
    judge = advice.judge
    lines: list[str] = []
    if BFLOAT16 not in judge.outcomes:  # float32 is not finite
        return lines
    outcome = judge.outcomes[BFLOAT16]
    if exponents := outcome.exponents:
        scale = judge.scale
        lines.append(
            f"in float16         {percent(underflow(exponents))} of the gradients become 0, and "
            f"{percent(underflow(exponents, scale))} with a scale of {scale:,.6g}, which is the "
            "largest without overflow"
        )
    operators = outcome.operators
    if operators and not outcome.failure:
        if operators["largest"]:
            where = operators["largest_in"] or "the loss"
            lines.append(
                f"largest value      {operators['largest']:,.4g}, computed in {where}; "
                "float16 has numbers up to 65,504"
            )
        modules = list(judge.deviations[BFLOAT16].kinds.items())[:MODULES_SHOWN]
        names = ", ".join(f"{name} {percent(size)}" for name, size in modules)
        lines.append(f"gradients off      {names}")
    if not math.isnan(judge.noise):
        lines.append(
            f"two batches        their gradients differ by {percent(judge.noise)}, so "
            f"{percent(judge.limit)} off is accurate enough"
        )
    if judge.spread > VARIES:
        lines.append(
            f"times              two runs in one precision differ by {percent(judge.spread)}: run "
            "this on a quiet machine"
        )
    for one in judge.outcomes:
        if not one.kept and one != UNSCALED and not judge.is_accurate(one):
            lines.append(f"{one.name:<18} {trouble(judge, one)}")
    return lines


def plot(advice: Advice, path: Path) -> None:
    """Draw the losses in all precisions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    judge = advice.judge
    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.suptitle(advice.verdict.sentences[0], fontsize=10)
    axes = figure.subplots()
    base = judge.base.losses
    axes.plot(range(1, len(base) + 1), base, color="black", linewidth=4, label="float32")
    for outcome in judge.outcomes.values():
        if outcome.precision != UNSCALED and len(outcome.losses) > 1:
            backwards = range(1, len(outcome.losses) + 1)
            axes.plot(backwards, outcome.losses, label=name_with_kept(outcome.precision))
    axes.set(ylabel="loss", xlabel="backward pass")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
