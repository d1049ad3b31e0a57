"""Draws a report: the phases of steps, the memory, and the scale of each scaler."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ampfuse.tools.command import show


def import_matplotlib() -> None:
    """Import matplotlib while threads can still start: its first import uses one to find fonts."""
    with suppress(Exception):  # plot() will raise it again
        import matplotlib.figure  # noqa: F401


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw what a report has into a file.

    Raises:
        ValueError: It has nothing to draw.
    """
    from matplotlib.figure import Figure

    drawn: list[tuple[Callable[[dict[str, Any], Any], None], dict[str, Any]]] = []
    if report["steps"] is not None:
        drawn.append((draw_steps, report["steps"]))
    if report["memory"] is not None and len(report["memory"]["step"]) > 1:
        drawn.append((draw_memory, report["memory"]))
    drawn += [(draw_scale, scaler) for scaler in report["scalers"] if scaler["history"]]
    if not drawn:
        raise ValueError("--plot: there were too few steps, and no scaler that was updated")
    figure = Figure(figsize=(9, 2.8 * len(drawn)), layout="constrained")
    all_axes = figure.subplots(len(drawn), squeeze=False)[:, 0]
    for (draw, numbers), axes in zip(drawn, all_axes, strict=True):
        draw(numbers, axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(show.title(report), fontsize=10)
    figure.savefig(path)


def draw_steps(steps: dict[str, Any], axes: Any) -> None:
    """Draw the phases of all steps over time."""
    milliseconds = steps["milliseconds"]
    whole = sum(milliseconds.values())
    timeline = dict(steps["timeline"])
    axes.stackplot(
        timeline.pop("step"),
        *timeline.values(),
        labels=[f"{name} {milliseconds[name]:,.1f} ms" for name in timeline],
        step="post",
    )
    totals = [sum(step) for step in zip(*timeline.values(), strict=True)]
    highest = min(max(totals), 3 * median(totals))  # rare spikes would flatten the rest
    axes.set(title=f"A step takes {whole:,.1f} ms", ylabel="ms", ylim=(0, 1.05 * highest or 1.0))


def draw_memory(memory: dict[str, Any], axes: Any) -> None:
    """Draw memory over steps."""
    for name, label in (("host", "the process, without pages of files"), ("gpu", "on the GPU")):
        if any(memory[name]):
            axes.plot(memory["step"], [size / 2**20 for size in memory[name]], label=label)
    axes.set(title="Memory after each step", ylabel="MiB", ylim=(0, None))


def draw_scale(scaler: dict[str, Any], axes: Any) -> None:
    """Draw a scaler's history: the scale where it changes, and skipped steps."""
    history = scaler["history"]
    updates = range(scaler["updates"] - len(history) + 1, scaler["updates"] + 1)
    scales = [max(record[0], 2.0**-149) for record in history]
    skipped = [i for i, record in enumerate(history) if record[1]]
    axes.step(updates, scales, where="post", label="scale")
    if skipped:
        marks = [scales[i] for i in skipped]
        axes.plot([updates[i] for i in skipped], marks, "x", color="#d1242f", label="skipped")
    axes.set(title="Loss scale")
    axes.set_yscale("log", base=2)
