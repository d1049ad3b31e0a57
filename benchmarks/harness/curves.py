"""Time and memory against the number of rows, one pair of panels for each operation and layer."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from harness.machine import Machine
from harness.plot import NARROWEST_INCHES, colours_of
from harness.report import Row

COLUMN_INCHES, PANEL_INCHES = 3.4, 2.6


def rows_and_layer(row: Row) -> tuple[int, str]:
    """Split a shape `rows x ...` into the number of rows and a label for the rest."""
    rows, _, layer = row.shape.partition("x")
    return int(rows), f"{layer.replace('x', ' features, ')} classes\n{row.dtype}"


def curves(path: Path, title: str, machine: Machine, rows: Sequence[Row]) -> bool:
    """Write the plot; return False if matplotlib is missing or nothing was measured."""
    measured = [row for row in rows if row.median_ms is not None and row.peak_mib is not None]
    if not measured or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    groups = list(dict.fromkeys((row.operation, rows_and_layer(row)[1]) for row in measured))
    colours = colours_of(measured)
    size = (max(NARROWEST_INCHES, COLUMN_INCHES * len(groups)), 2 * PANEL_INCHES + 1)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(groups), squeeze=False, sharey="row")
    for column, (operation, layer) in enumerate(groups):
        memory, time = panels[0][column], panels[1][column]
        for provider, colour in colours.items():
            own = sorted(
                (rows_and_layer(row)[0], row.peak_mib, row.median_ms)
                for row in measured
                if (row.operation, rows_and_layer(row)[1], row.provider)
                == (operation, layer, provider)
            )
            style = {"color": colour, "marker": "o", "markersize": 4}
            counts = [count for count, _, _ in own]
            memory.plot(counts, [peak for _, peak, _ in own], **style)
            time.plot(counts, [ms for _, _, ms in own], **style)
        memory.set_title(f"{operation}: {layer}", fontsize=9)
        time.set_xlabel("rows", fontsize=9)
        for panel in (memory, time):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(visible=True, linewidth=0.4)
            panel.tick_params(labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("memory held at the peak, MiB", fontsize=9)
    panels[1][0].set_ylabel("median, ms", fontsize=9)
    figure.legend(
        [Line2D([], [], color=colour, marker="o", markersize=4) for colour in colours.values()],
        list(colours),
        loc="outside lower center",
        ncols=len(colours),
        frameon=False,
    )
    figure.suptitle(f"{title} on {machine.name}, torch {machine.torch}", fontsize=10)
    figure.savefig(path, dpi=150)
    return True
