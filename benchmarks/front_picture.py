"""Draws the picture of the front page from the numbers of its table.

python benchmarks/front_picture.py
"""

import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness.case import OURS
from harness.plot import COLORS, OTHER_COLOR
from harness.published import BOTH, COMPILED, FRONT, TABLES
from matplotlib.patches import Patch
from tables import ROOT, text, value

PICTURE = ROOT / "docs" / "images" / "speed.png"

BAR_COLORS = (COLORS[OURS], COLORS[BOTH.head], COLORS["torch.compile"], OTHER_COLOR)


def main() -> None:
    """Draw time per case as a share of torch's: shorter bars are faster."""
    table = TABLES["front"]
    torchs, compiled, both, ours = table.columns
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for position, line in enumerate(reversed(table.lines)):
        base = value(line, torchs)
        assert base is not None
        bars = [
            (measured, color)
            for column, color in zip((ours, both, compiled, torchs), BAR_COLORS, strict=True)
            if (measured := value(line, column)) is not None
        ]
        for place, (measured, color) in enumerate(bars):
            offset = 0.22 * ((len(bars) - 1) / 2 - place)
            share = min(measured / base, 2.0)
            axes.barh(position + offset, share, 0.2, color=color)
            label = f"{text(measured)} ms"
            axes.text(
                share + 0.02, position + offset, label, va="center", fontsize=7, color="#333333"
            )
    names = [f"{label} ({machine})".replace("`", "") for label, (machine, *_) in FRONT.items()]
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 44) for name in reversed(names)])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlim(0, 2.3)
    axes.set_xticks([0, 0.5, 1, 1.5, 2])
    axes.set_xlabel("time, as a multiple of torch's (shorter is faster)", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("Time of training steps and of their parts", fontsize=11)
    handles = [Patch(color=color) for color in BAR_COLORS]
    labels = ["ampfuse", BOTH.head, COMPILED.head, "torch"]
    axes.legend(handles, labels, frameon=False, fontsize=9, loc="lower right")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
