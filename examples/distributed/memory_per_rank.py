"""Trains one model distributed in several ways, and compares the memory that each rank needs.

    python memory_per_rank.py [--ranks 2] [--layers 4] [--width 512] [--weights bfloat16]

Each strategy trains in processes of its own: on GPUs if there is one for each rank, otherwise on
the CPU. All train the same model on the same sentences, so their losses must be the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from strategies import STRATEGIES
from transformer import HEADS

MIB = 2**20
ALONE = "one process"
# The largest relative difference between the losses of two strategies. In bfloat16, sums over ranks
# and micro-batches are rounded in other places.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-3}
COLORS = {"weights": "#5b7c99", "gradients": "#4d8f7a", "state": "#7d5ba6", "rest": "#d0d5d9"}


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank needs, and the seconds of a step."""

    weights: int
    gradients: int
    state: int
    peak: int
    seconds: float

    @property
    def rest(self) -> int:
        """The part of the peak that is activations, buffers and gathered parameters."""
        return max(0, self.peak - self.weights - self.gradients - self.state)


@dataclass(frozen=True)
class Figures:
    """The measurements of one strategy."""

    ranks: list[Memory]
    losses: list[float]

    @property
    def largest(self) -> Memory:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)


def figures(read: dict[str, Any]) -> Figures:
    """Return measurements that were read from JSON."""
    return Figures([Memory(**rank) for rank in read["ranks"]], read["losses"])


def run(name: str, options: argparse.Namespace, on_gpu: bool) -> Figures:
    """Train with a strategy, in new processes."""
    ranks = 1 if name == ALONE else options.ranks
    environment = {
        # Without this, malloc keeps memory that has been freed, and peaks depend on chance.
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **os.environ,
    }
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(ranks)]
        command += [str(Path(__file__).with_name("one_strategy.py")), name]
        command += [str(number) for number in (options.layers, options.width, options.steps)]
        command += [options.weights, str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}\n{name} failed: see above")
        return figures(json.loads(result.read_text()))


def table(results: dict[str, Figures], title: str) -> Table:
    """Return a table with a row for each strategy."""
    caption = (
        "MiB of the rank that needs the most; peak: since before the model was made; "
        "loss: of the last step"
    )
    drawn = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    drawn.add_column("strategy", no_wrap=True)
    for heading in ("weights", "gradients", "state", "peak", "× one", "s/step", "loss"):
        drawn.add_column(heading, justify="right")
    for name, each in results.items():
        rank = each.largest
        sizes = (rank.weights, rank.gradients, rank.state, rank.peak)
        drawn.add_row(
            name,
            *(f"{size / MIB:,.1f}" for size in sizes),
            f"{rank.peak / results[ALONE].largest.peak:.2f}",
            f"{max(one.seconds for one in each.ranks):.2f}",
            f"{each.losses[-1]:.4f}",
        )
    return drawn


def difference(results: dict[str, Figures]) -> float:
    """Return the largest relative difference of a loss from that of one process."""
    expected = results[ALONE].losses
    return max(
        abs(loss / other - 1)
        for each in results.values()
        for loss, other in zip(each.losses, expected, strict=True)
    )


def gain(results: dict[str, Figures]) -> str:
    """Return sentences about the strategy that needs the least, and about the losses."""
    peaks = {name: each.largest.peak for name, each in results.items()}
    least = min(peaks, key=peaks.__getitem__)
    return (
        f"{least} needs the least memory: {peaks[least] / MIB:,.1f} MiB per rank, "
        f"{1 - peaks[least] / peaks[ALONE]:.0%} less than one process. "
        f"Losses differ from those of one process by at most {difference(results):.1e} of them."
    )


def plot(path: Path, results: dict[str, Figures], title: str) -> None:
    """Draw the parts of each strategy's peak as stacked bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="MiB of the rank that needs the most")
    ranks = [each.largest for each in results.values()]
    left = [0.0] * len(ranks)
    for part, color in COLORS.items():
        sizes = [getattr(rank, part) / MIB for rank in ranks]
        axes.barh(list(results), sizes, 0.6, left, color=color, label=part)
        left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=len(COLORS))
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--layers", type=int, default=4, help="at least one for each rank")
    parser.add_argument("--width", type=int, default=512, help=f"a multiple of {HEADS}")
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--weights", choices=TOLERANCES, default="float32")
    parser.add_argument("--out", type=Path, default=Path("memory_per_rank.png"))
    parser.add_argument("--result", type=Path, help="where the figures of all ranks go, as JSON")
    options = parser.parse_args()
    if options.layers < options.ranks:
        parser.error(f"--layers: expected at least {options.ranks}, got {options.layers}")
    if options.width % HEADS or options.width <= 0:
        parser.error(f"--width: expected a multiple of {HEADS}, got {options.width}")
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, got {options.steps}")
    return options


def main() -> int:
    """Run the strategies; return 1 if their losses differ."""
    options, console = arguments(), Console()
    on_gpu = torch.cuda.device_count() >= options.ranks
    # Without a GPU, offload moves nothing.
    names = [name for name in STRATEGIES if on_gpu or name != "FSDP2 + offload"]
    results: dict[str, Figures] = {}
    with console.status("") as status:
        for name in names:
            status.update(name)
            results[name] = run(name, options, on_gpu)

    params = results[ALONE].largest.weights / getattr(torch, options.weights).itemsize
    title = (
        f"{params / 1e6:.1f} million {options.weights} parameters, {options.ranks} ranks, "
        f"{'GPUs' if on_gpu else 'CPU'}"
    )
    console.print(table(results, title))
    console.print(gain(results))
    if not on_gpu:
        console.print("FSDP2 with CPU offload is left out: without a GPU it moves nothing.")
    plot(options.out, results, title)
    console.print(f"wrote {options.out}")
    if options.result:
        measured = {name: asdict(each) for name, each in results.items()}
        options.result.write_text(json.dumps(measured))
    if difference(results) > TOLERANCES[options.weights]:
        print(f"the losses differ by more than {TOLERANCES[options.weights]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
