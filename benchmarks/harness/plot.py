"""Draws the PNG of a benchmark: how many times as fast as torch each provider is, case by case.

Bars begin at 1, where torch is. A bar to the right is faster than torch, and one to the left is
slower. The milliseconds are written beside it. Benchmarks that measure memory have a second panel:
the memory as a share of torch's.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness.case import OURS
from harness.machine import Machine
from harness.pictures import MOST_CASES, PICTURES, Picture
from harness.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each provider has the same color in all pictures.
COLORS = {
    OURS: "#d9542b",
    f"{OURS}, torch.compile": "#f0a37f",
    f"{OURS}, tiles": "#f0a37f",
    "torch.compile": "#5b7c99",
    "torch, chunks": "#c7b299",
    "torch .float()": "#c7b299",
    "torch fused": "#8b98a5",
    "torch fused=True": "#8b98a5",
    "quack": "#7d6b91",
    "Liger": "#8fae8b",
    "CCE": "#6b9191",
    "apex": "#b58fa5",
    "TransformerEngine": "#9a8f5b",
}
OTHER_COLOR = "#a8b3bd"
WORDS = {
    "torch .float()": "torch on float32 logits",
    "torch, chunks": "torch, 1024 rows at a time",
    "torch foreach": "torch, foreach",
    "torch fused": "torch, fused",
    "torch fused=True": "torch, fused",
    f"{OURS}, torch.compile": "ampfuse and torch.compile",
    f"{OURS}, tiles": "ampfuse, by tiles of classes",
}
BAR_INCHES = 0.19
PANEL_INCHES = 4.6


def milliseconds(value: float) -> str:
    """Format with three significant digits, without an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def chosen(rows: Sequence[Row], picture: Picture) -> dict[str, list[Row]]:
    """Return the measured rows of at most MOST_CASES cases by label: torch's, then the others.

    If no case of the picture was measured, the first cases are drawn, by their names.
    """
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if row.median_ms is not None:
            cases.setdefault(row.case, []).append(row)
    # Compare with the provider `torch` if it was measured, otherwise with torch's first provider.
    for own in cases.values():
        own.sort(key=lambda row: (row.provider != "torch", not row.provider.startswith("torch")))
    compared = {case for case, own in cases.items() if own[0].provider.startswith("torch")}
    drawn = [case for case in picture.labels if case in compared]
    drawn = drawn or [case for case in cases if case in compared]
    return {picture.labels.get(case, case): cases[case] for case in drawn[:MOST_CASES]}


def plot(path: Path, name: str, machine: Machine, rows: Sequence[Row]) -> bool:
    """Write the plot; return False if matplotlib is missing or nothing was measured."""
    picture = PICTURES.get(name, Picture(name, {}))
    cases = chosen(rows, picture)
    if not cases or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    weighs = all(row.peak_mib is not None for own in cases.values() for row in own)
    bars = sum(max(len(own), 2) for own in cases.values())
    size = (2.4 + PANEL_INCHES * (1 + weighs), 1.3 + BAR_INCHES * (bars + len(cases)))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + weighs, squeeze=False, sharey=True)[0]
    draw_times(panels[0], cases)
    if weighs:
        draw_memory(panels[1], cases)
    for panel in panels:
        panel.tick_params(axis="y", length=0)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
    legend = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=len(legend),
        frameon=False,
        fontsize=9,
    )
    version = machine.torch.partition("+")[0]
    figure.suptitle(f"{picture.title}\n{machine.name}, torch {version}", fontsize=10)
    figure.savefig(path, dpi=120)
    return True


def draw_times(panel: "Axes", cases: dict[str, list[Row]]) -> None:
    """Draw how many times as fast as torch the others are."""
    ratios = [1.0]
    ticks, labels, place = [], [], 0.0
    for label, (reference, *others) in cases.items():
        first = place
        for row in others:
            ratio = time_of(reference) / time_of(row)
            ratios.append(ratio)
            draw_bar(panel, place, 1, ratio, row.provider, f"{milliseconds(time_of(row))} ms")
            place += 1
        ticks.append((first + place - 1) / 2)
        held = "" if reference.peak_mib is None else f", {reference.peak_mib:.0f} MiB"
        name = WORDS.get(reference.provider, reference.provider)
        labels.append(f"{label}\n{name}: {milliseconds(time_of(reference))} ms{held}")
        place += 1
    lowest, highest = min(ratios), max(ratios)
    panel.set_xscale("log", base=2)
    panel.set_xlim(min(0.8, lowest * 0.5), max(2.0, highest * 1.6))  # room for milliseconds
    panel.xaxis.set_major_formatter("{x:g}×")
    panel.minorticks_off()
    panel.axvline(1, color="#444444", linewidth=0.8)
    panel.set_xlabel("times as fast as torch: longer is faster", fontsize=8)
    panel.set_yticks(ticks, labels)
    panel.invert_yaxis()


def draw_memory(panel: "Axes", cases: dict[str, list[Row]]) -> None:
    """Draw the peak memory as a share of torch's."""
    place, most = 0.0, 1.0
    for reference, *others in cases.values():
        for row in others:
            share = memory_of(row) / memory_of(reference)
            most = max(most, share)
            draw_bar(panel, place, 0, share, row.provider, f"{memory_of(row):.0f} MiB")
            place += 1
        place += 1
    panel.set_xlim(0, 1.25 * most)
    panel.xaxis.set_major_formatter("{x:.0%}")
    panel.axvline(1, color="#444444", linewidth=0.8)
    panel.set_xlabel("peak memory, compared with torch's: shorter is less", fontsize=8)


def draw_bar(
    panel: "Axes", place: float, left: float, right: float, provider: str, text: str
) -> None:
    color = COLORS.get(provider, OTHER_COLOR)
    label = WORDS.get(provider, provider)
    bar = panel.barh(place, right - left, 0.85, left=left, color=color, label=label)
    panel.bar_label(bar, [text], padding=3, fontsize=7)


def time_of(row: Row) -> float:
    assert row.median_ms is not None
    return row.median_ms


def memory_of(row: Row) -> float:
    assert row.peak_mib is not None
    return row.peak_mib
