"""Draws a report: the phases of steps, the memory, and the scale of each scaler."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampfuse.tools.command import show

COLORS = {
    "input": "#d9730d",
    "forward": "#4a90d9",
    "backward": "#1f4e79",
    "optimizer": "#4f8a3c",
    "scaler": "#a9d18e",
    "other": "#9a9a9a",
}
MARKS = 500  # of skipped steps that are drawn


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw what a report has into a file. Return False if it has nothing to draw."""
    from matplotlib.figure import Figure

    drawn: list[tuple[Callable[[dict[str, Any], Any], None], dict[str, Any]]] = []
    if report["steps"] is not None:
        drawn.append((draw_steps, report["steps"]))
    if report["memory"] is not None and len(report["memory"]["step"]) > 1:
        drawn.append((draw_memory, report["memory"]))
    drawn += [(draw_scale, scaler) for scaler in report["scalers"] if scaler["history"]]
    if not drawn:
        return False
    figure = Figure(figsize=(9, 2.8 * len(drawn)), layout="constrained")
    all_axes = figure.subplots(len(drawn), squeeze=False)[:, 0]
    for (draw, numbers), axes in zip(drawn, all_axes, strict=True):
        draw(numbers, axes)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(show.title(report), fontsize=10)
    figure.savefig(path)
    return True


def draw_steps(steps: dict[str, Any], axes: Any) -> None:
    """Draw the phases of all steps over time."""
    milliseconds = steps["milliseconds"]
    whole = sum(milliseconds.values())
    timeline = dict(steps["timeline"])
    xs = timeline.pop("step")
    axes.stackplot(
        xs,
        *timeline.values(),
        labels=[f"{name} {milliseconds[name]:,.1f} ms" for name in timeline],
        colors=[COLORS.get(name) for name in timeline],
        step="post",
    )
    highest = ceiling([sum(values) for values in zip(*timeline.values(), strict=True)])
    axes.set(title=f"A step takes {whole:,.1f} ms", ylabel="ms", ylim=(0, highest))


def draw_memory(memory: dict[str, Any], axes: Any) -> None:
    """Draw memory over steps."""
    names = {
        "host": "memory of the process, without pages of files",
        "gpu": "memory of tensors on the GPU",
    }
    for name, label in names.items():
        if any(memory[name]):
            axes.plot(memory["step"], [size / 2**20 for size in memory[name]], label=label)
    axes.set(title="Memory after each step", ylabel="MiB", ylim=(0, None))


def draw_scale(scaler: dict[str, Any], axes: Any) -> None:
    """Draw a scaler's history: the scale where it changes, and skipped steps."""
    history, first = scaler["history"], show.first_update(scaler)
    scales = [max(record[0], 2.0**-149) for record in history]
    skipped = [i for i, record in enumerate(history) if record[1]]
    skipped = skipped[:: math.ceil(len(skipped) / MARKS) or 1]
    kept = [i for i in range(len(history)) if i == 0 or scales[i] != scales[i - 1]]
    kept.append(len(history) - 1)
    axes.step([first + i for i in kept], [scales[i] for i in kept], where="post", label="scale")
    if skipped:
        marks = [scales[i] for i in skipped]
        axes.plot([first + i for i in skipped], marks, "x", color="#d1242f", label="skipped")
    axes.set(title="Loss scale")
    axes.set_yscale("log", base=2)


def ceiling(values: list[float]) -> float:
    """Return the upper end of an axis, which cuts off rare spikes that would flatten the rest."""
    ordered = sorted(values)
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    return min(ordered[-1], 3 * usual) * 1.05 or 1.0
