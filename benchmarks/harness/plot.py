"""Draws the PNG: operations side by side, cases down the page, one bar per provider.

A bar is the share of the machine's measured ceiling that the provider reached, so that cases of
very different sizes fit one axis; the milliseconds are written beside it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness.case import OURS
from harness.machine import Machine
from harness.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER_COLOURS = ["#a8b3bd", "#5b7c99", "#c7b299", "#7d6b91", "#8fae8b"]
OUR_COLOUR = "#d9542b"
BAR = 0.8  # a bar's thickness, relative to the distance between two bars
BAR_INCHES = 0.21
PANEL_INCHES = 2.6
NARROWEST_INCHES = 7.5  # the width of title and legend
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # keeps text off the 100% line


def case_label(row: Row) -> str:
    return f"{row.shape}\n{row.dtype}"


def colours_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return each provider's colour, in the order of the rows."""
    providers = list(dict.fromkeys(row.provider for row in rows))
    peers = [name for name in providers if name != OURS]
    of_peers = dict(zip(peers, PEER_COLOURS * len(peers), strict=False))
    return {name: of_peers.get(name, OUR_COLOUR) for name in providers}


def milliseconds(value: float) -> str:
    """Format with three significant digits, without an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"


def plot(path: Path, title: str, machine: Machine, rows: Sequence[Row]) -> bool:
    """Write the plot; return False if matplotlib is missing or nothing was measured."""
    measured = [row for row in rows if row.of_ceiling is not None]
    if not measured or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(row.operation for row in measured))
    cases = list(dict.fromkeys(case_label(row) for row in measured))
    colours = colours_of(measured)
    providers = list(colours)

    height = len(cases) * (len(providers) + 1) * BAR_INCHES + 1.7
    width = max(NARROWEST_INCHES, 1.6 + PANEL_INCHES * len(operations))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(operations), squeeze=False, sharex=True, sharey=True)[0]
    for panel, operation in zip(panels, operations, strict=True):
        own = [row for row in rows if row.operation == operation]
        draw_panel(panel, own, cases, providers, colours)
        panel.set_title(f"{operation}\n{ceiling_label(own)}", fontsize=9)
    furthest = max(row.of_ceiling or 0.0 for row in measured)
    panels[0].set_xlim(0, 1.28 * max(1.0, furthest))  # room for the milliseconds
    panels[0].set_yticks(range(len(cases)), cases, fontsize=8)
    panels[0].invert_yaxis()

    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    legend = "bars: fewest possible bytes / time, as a share of the measured ceiling; text: median"
    figure.suptitle(f"{title} on {machine.name}, torch {machine.torch}\n{legend}", fontsize=10)
    figure.savefig(path, dpi=150)
    return True


def ceiling_label(rows: Sequence[Row]) -> str:
    kinds = {f"100% = {row.ceiling}, {row.ceiling_rate}" for row in rows if row.ceiling}
    return ", ".join(sorted(kinds))


def draw_panel(
    panel: "Axes",
    rows: Sequence[Row],
    cases: Sequence[str],
    providers: Sequence[str],
    colours: dict[str, str],
) -> None:
    step = 1 / (len(providers) + 1)  # one bar's width of space between cases
    for index, provider in enumerate(providers):
        own = [row for row in rows if row.provider == provider and case_label(row) in cases]
        shift = (index - (len(providers) - 1) / 2) * step
        positions = [cases.index(case_label(row)) + shift for row in own]
        lengths = [row.of_ceiling or 0.0 for row in own]
        bars = panel.barh(
            positions, lengths, height=BAR * step, color=colours[provider], label=provider
        )
        texts = [f"{milliseconds(row.median_ms)} ms" if row.median_ms else "not run" for row in own]
        panel.bar_label(bars, texts, padding=3, fontsize=7, bbox=LABEL_BOX)
    panel.axvline(1.0, color="#444444", linewidth=0.8, linestyle="--", zorder=0)
    panel.xaxis.set_major_formatter("{x:.0%}")
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
