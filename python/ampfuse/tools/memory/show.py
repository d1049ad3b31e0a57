"""Shows accounts: as text, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ampfuse._texts import size_text, without_numbers
from ampfuse.tools.memory.record import KINDS

if TYPE_CHECKING:
    from ampfuse.tools.memory.account import Account, Saving

MODULES_SHOWN = 8
LEAST_SAVING = 0.01  # of the peak; changes that save less are not shown
# One color per kind, in the order of KINDS: blue for weights, masters and gradients, green for
# moments and buffers, other colors for what belongs to the batch.
COLORS = dict(
    zip(
        KINDS,
        (
            *("#1f4e79", "#5ba3d9", "#2e75b6", "#9dc3e6", "#548235", "#a9d18e"),
            *("#c55a11", "#f4b183", "#ffd966", "#a6a6a6"),
        ),
        strict=True,
    )
)


MODULES = "activations at the peak, by the module that computed them"
CHANGES = "the peak after one change of the program"


def title(account: Account) -> str:
    """Return a line with the peak."""
    place = "GPU" if account.device == "cuda" else "CPU"
    return f"peak of a training step on a {place}: {size_text(account.peak)}, in {account.phase}"


def by_kind_of_module(modules: dict[str, int]) -> dict[str, int]:
    """Add up modules whose names differ only in numbers, the largest first."""
    sums: dict[str, int] = {}
    for name, size in modules.items():
        short = without_numbers(name) or "outside modules"
        sums[short] = sums.get(short, 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def modules_shown(account: Account) -> list[tuple[str, int]]:
    """Return the rows of the table of modules; the last one is the sum of those left out."""
    modules = list(by_kind_of_module(account.modules).items())
    rest = sum(size for _, size in modules[MODULES_SHOWN:])
    others = [("others", rest)] if rest else []
    return modules[:MODULES_SHOWN] + others


def savings_shown(account: Account) -> list[Saving]:
    """Return the changes that save enough."""
    most = account.peak * (1 - LEAST_SAVING)
    return [saving for saving in account.savings if saving.peak < most]


def text(account: Account) -> str:
    """Return the account as a table of plain text."""
    lines = [title(account)]
    for kind, size in account.kinds.items():
        lines.append(f"  {kind:<28}{size_text(size):>12}{size / account.peak:>7.0%}")
    modules = modules_shown(account)
    if modules:
        lines.append(MODULES)
        lines += [f"  {name:<28}{size_text(size):>12}" for name, size in modules]
    savings = savings_shown(account)
    if savings:
        lines.append(CHANGES)
    for saving in savings:
        name, peak, change = saving.name, size_text(saving.peak), saving.peak / account.peak - 1
        lines.append(f"  {name:<28}{peak:>12}{change:>+7.0%}  {saving.how}".rstrip())
    return "\n".join(lines)


def show(account: Account) -> None:
    """Print the account."""
    print(text(account))


def plot(account: Account, path: Path) -> None:
    """Draw the account, and what it would be after each change, as stacked bars."""
    from matplotlib.figure import Figure

    bars = [("as it is", account.kinds)]
    bars += [(saving.name, saving.kinds) for saving in savings_shown(account)]
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(bars)), layout="constrained")
    axes = figure.add_subplot(title=title(account), xlabel="MiB")
    rows = range(len(bars))
    ends = [0.0] * len(bars)
    for kind in KINDS:
        sizes = [kinds.get(kind, 0) / 2**20 for _, kinds in bars]
        if any(sizes):
            axes.barh(rows, sizes, left=ends, color=COLORS[kind], label=kind, height=0.7)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for row, end in zip(rows, ends, strict=True):
        axes.text(end, row, f" {size_text(end * 2**20)}", va="center", fontsize=8)
    axes.set_yticks(rows, [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(ends))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=150)
