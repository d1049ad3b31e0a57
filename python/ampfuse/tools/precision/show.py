"""Shows a verdict: as text, as numbers for JSON, and as a picture."""

from pathlib import Path
from typing import Any

import torch

from ampfuse._texts import columns, percent, size_text
from ampfuse.tools.precision.outcome import BFLOAT16, FLOAT32, Outcome
from ampfuse.tools.precision.verdict import Verdict

MODULES_SHOWN = 5
HEAD = ("precision", "step", "memory", "gradients off", "loss off", "skipped", "last loss")


def text(advice: Verdict, program: str) -> str:
    """Return the advice as plain text."""
    base = advice.judge.base
    device = base.gpu or f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
    lines = [f"{program}: {base.steps} steps in each precision, on {device}"]
    outcomes = (base, *advice.judge.outcomes.values())
    lines += [f"  {line}" for line in columns([HEAD, *(row(advice, one) for one in outcomes)])]
    if rows := details(advice):
        lines += ["", *(f"  {name:<18} {detail}" for name, detail in rows)]
    lines += ["", *advice.sentences]
    is_done = advice.precision != FLOAT32
    nothing = "none: the program does this already" if is_done else "none"
    lines += ["", "lines to change", *(f"  {line}" for line in advice.lines or [nothing])]
    return "\n".join(lines)


def row(advice: Verdict, outcome: Outcome) -> tuple[str, ...]:
    """Return the texts of one row."""
    precision, judge = outcome.precision, advice.judge
    if outcome.failure:
        return str(precision), "fails", "", "", "", "", ""
    deviation = judge.deviations.get(precision)
    time = "" if outcome.milliseconds is None else f"{outcome.milliseconds:,.1f} ms"
    memory = size_text(outcome.peak) if outcome.peak else ""
    gradient = percent(deviation.gradient) if deviation else ""
    loss = percent(deviation.loss) if deviation else ""
    skipped = str(outcome.skipped) if precision.is_scaled else ""
    is_whole = len(outcome.losses) == len(judge.base.losses)
    last = f"{outcome.last_loss:.4g}" if is_whole else ""
    return str(precision), time, memory, gradient, loss, skipped, last


def details(advice: Verdict) -> list[tuple[str, str]]:
    """Return rows about gradients and operators, each a name and a text."""
    judge = advice.judge
    if BFLOAT16 not in judge.outcomes or judge.outcomes[BFLOAT16].failure:
        return []
    modules = list(judge.deviations[BFLOAT16].modules.items())[:MODULES_SHOWN]
    rows = [
        ("largest scale", f"{judge.scale:,.6g}, by which no gradient overflows in float16"),
        ("gradients off", ", ".join(f"{name} {percent(size)}" for name, size in modules)),
    ]
    if judge.noise:
        limit = f"so {percent(judge.limit)} off is accurate enough"
        rows.append(("two batches", f"their gradients differ by {percent(judge.noise)}, {limit}"))
    return rows


def as_dict(advice: Verdict) -> dict[str, Any]:
    """Return all numbers as dicts and lists, for JSON."""
    judge = advice.judge
    outcomes = []
    for outcome in (judge.base, *judge.outcomes.values()):
        deviation = judge.deviations.get(outcome.precision)
        found = vars(outcome) | {
            "precision": outcome.precision.name,
            "kept": list(outcome.precision.kept),
            "deviation": vars(deviation) if deviation else {},
        }
        del found["gradients"], found["outputs"]
        outcomes.append(found)
    return {
        "precision": advice.precision.name,
        "kept": list(advice.precision.kept),
        "sentences": advice.sentences,
        "lines": advice.lines,
        "noise": judge.noise,
        "scale": judge.scale,
        "outcomes": outcomes,
    }


def plot(advice: Verdict, path: Path) -> None:
    """Draw the losses in all precisions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    judge = advice.judge
    figure = Figure(figsize=(6, 4), layout="constrained")
    figure.suptitle(advice.sentences[0], fontsize=10)
    axes = figure.subplots()
    base = judge.base.losses
    axes.plot(range(1, len(base) + 1), base, color="black", linewidth=4, label="float32")
    for precision, outcome in judge.outcomes.items():
        backwards = range(1, len(outcome.losses) + 1)
        axes.plot(backwards, outcome.losses, label=str(precision))
    axes.set(ylabel="loss", xlabel="backward pass")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
