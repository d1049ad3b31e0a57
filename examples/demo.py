"""Trains a small language model in float32, with torch.amp and with ampfuse, and compares.

    python examples/demo.py [--precision bfloat16|float16] [--steps 40] [--out demo.png]
    python examples/demo.py --width 768 --layers 12 --micro-batches 4 --recompute     # on a GPU

There are two programs: language_model/train_torch.py and language_model/train_ampfuse.py. The first
runs three times: in float32, with torch.amp, and with torch.amp under `python -m ampfuse`, which
replaces torch's optimizer and loss by ampfuse's. All runs have the same seed and the same batches.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from comparison import COLORS, parsed, parser, run_all
from rich.console import Console
from rich.table import Table

PROGRAMS = Path(__file__).parent / "language_model"
# The parts of a step and the runs have different colors.
PARTS = {"forward": "#b7d3c6", "loss": "#7d5ba6", "backward": "#4d8f7a", "optimizer": "#c7b3dc"}
RUNS = COLORS | {"python -m ampfuse": "#e6b450"}
AVERAGED = 5  # number of losses in a mean, since those of single batches vary
STEPS = 40
# Maximum loss after STEPS. A new model has 11, and one that only knows word frequencies has 6.5.
LEARNED = 7.5
APART = 0.3  # maximum difference between the last losses of the runs
SLOW = 8  # small batches are used if torch's products take this many times as long as in float32


def commands(precision: str) -> dict[str, list[str]]:
    """Return Python's arguments for each run."""
    plain, ours = (str(PROGRAMS / name) for name in ("train_torch.py", "train_ampfuse.py"))
    return {
        "float32": [plain, "--precision", "float32"],
        "torch.amp": [plain, "--precision", precision],
        "python -m ampfuse": ["-m", "ampfuse", "--quiet", plain, "--precision", precision],
        "ampfuse": [ours, "--precision", precision],
    }


@dataclass(frozen=True)
class Figures:
    """The measurements of one run."""

    logits: list[int]  # shape of the logits
    losses: list[float]
    ends: list[float]  # end of each step, in seconds since the first step began
    seconds: float  # duration of a step
    seconds_of: dict[str, float]  # duration of each part of a step
    bytes_of: dict[str, int]  # peak memory in each part, minus that before the model was made

    @property
    def peak_bytes(self) -> int:
        """The peak memory of all parts."""
        return max(self.bytes_of.values())

    @property
    def means(self) -> list[float]:
        """For each step, the mean of the last AVERAGED losses."""
        ends = range(1, len(self.losses) + 1)
        return [statistics.fmean(self.losses[max(0, end - AVERAGED) : end]) for end in ends]


def slowness(precision: str) -> float:
    """Return the time of torch's matrix product on this CPU, divided by its time in float32."""

    def seconds(dtype: torch.dtype) -> float:
        # The shapes are like those in the backward pass of the last layer.
        left, right = torch.ones(64, 4096, dtype=dtype), torch.ones(4096, 128, dtype=dtype)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(getattr(torch, precision)) / seconds(torch.float32)


def table(results: dict[str, Figures], title: str) -> Table:
    """Return a table with a row for each run."""
    caption = (
        "peak: the most memory of the process, less what it held before the model was made; "
        f"loss: of the first step → mean of the last {AVERAGED}"
    )
    drawn = Table(title=title, caption=caption)
    drawn.add_column("run")
    for heading in ("s per step", "× torch.amp", "peak MiB", "loss"):
        drawn.add_column(heading, justify="right")
    reference = results["torch.amp"].seconds
    for name, figures in results.items():
        drawn.add_row(
            name,
            f"{figures.seconds:.3f}",
            f"{reference / figures.seconds:.2f}",
            f"{figures.peak_bytes / 2**20:.0f}",
            f"{figures.losses[0]:.2f} → {figures.means[-1]:.2f}",
        )
    return drawn


def gain(results: dict[str, Figures], precision: str, slower: float) -> str:
    """Describe what ampfuse gained on this machine, and why.

    `slower`: the result of `slowness`.
    """
    float32, torch_amp, patched, ours = results.values()
    rows, classes = ours.logits
    sentences = [
        f"ampfuse trains {torch_amp.seconds / ours.seconds:.1f} times as fast as torch.amp here, "
        f"in {ours.peak_bytes / torch_amp.peak_bytes:.0%} of its memory. torch keeps the "
        f"{rows} × {classes} logits ({rows * classes / 2**18:.0f} MiB in float32) for the backward "
        f"pass; ampfuse takes their gradient in the pass that computes the loss, and keeps none.",
        f"The unchanged program under python -m ampfuse is "
        f"{torch_amp.seconds / patched.seconds:.1f} times as fast as torch.amp, in "
        f"{patched.peak_bytes / torch_amp.peak_bytes:.0%} of its memory.",
    ]
    if slower > SLOW:
        sentences.append(
            f"torch multiplies {precision} matrices {slower:.0f} times slower than float32 ones on "
            f"this machine. ampfuse computes the last layer, the largest one, without that product."
        )
    if ours.seconds > 1.1 * float32.seconds:
        sentences.append(
            f"Mixed precision does not save time on this machine: ampfuse takes "
            f"{ours.seconds / float32.seconds:.1f} times as long as float32."
        )
    return " ".join(sentences)


def shortcomings(results: dict[str, Figures], steps: int) -> list[str]:
    """Return what is wrong with the runs: one did not learn, or their last losses differ."""
    ends = {name: figures.means[-1] for name, figures in results.items()}
    found = []
    poor = [name for name, loss in ends.items() if steps >= STEPS and loss > LEARNED]
    if poor:
        found.append(f"loss above {LEARNED} at the end: {', '.join(poor)}")
    if max(ends.values()) - min(ends.values()) > APART:
        found.append(f"the losses at the end differ by more than {APART}")
    return found


def plot(path: Path, results: dict[str, Figures], title: str) -> None:
    """Draw the losses over time, and a step's time and memory by part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplot_mosaic([["loss", "time"], ["loss", "memory"]], width_ratios=[5, 6])
    for name, figures in results.items():
        axes["loss"].plot(figures.ends, figures.means, label=name, linewidth=2, color=RUNS[name])
    axes["loss"].set(
        xlabel="seconds", ylabel=f"mean loss of {AVERAGED} steps", title="loss over time"
    )
    axes["loss"].legend(frameon=False)

    rows = range(len(results))
    height = 0.8 / len(PARTS)
    left = [0.0] * len(results)
    for index, (part, color) in enumerate(PARTS.items()):
        seconds = [figures.seconds_of[part] for figures in results.values()]
        axes["time"].barh(rows, seconds, 0.6, left, color=color, label=part)
        left = [sum(pair) for pair in zip(left, seconds, strict=True)]
        peaks = [figures.bytes_of[part] / 2**20 for figures in results.values()]
        places = [row - 0.4 + (index + 0.5) * height for row in rows]
        axes["memory"].barh(places, peaks, height, color=color)
    axes["time"].set(title="seconds of a step, medians of each part")
    axes["time"].legend(frameon=False, ncols=len(PARTS), fontsize="small")
    axes["time"].set_ylim(len(results) - 0.5, -1.1)
    axes["memory"].set(title="peak memory in each part, MiB")
    axes["memory"].invert_yaxis()
    for name in ("time", "memory"):
        axes[name].set_yticks(rows, list(results))
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Run the programs; return 1 if one did not learn, or their last losses differ."""
    options = parser("Train in float32, with torch.amp, with ampfuse.", "demo.png")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--sequences", type=int, help="of 64 words, in a step")
    options.add_argument("--micro-batches", type=int, default=1, help="in a step")
    options.add_argument("--recompute", action="store_true", help="activations, in backward")
    options.add_argument("--width", type=int, default=128, help="of the model, a multiple of 32")
    options.add_argument("--layers", type=int, default=2)
    given = parsed(options)
    if given.steps < 2:
        options.error(f"--steps: at least 2, got {given.steps}")
    on_cpu, precision = given.device == "cpu", given.precision
    slower = slowness(precision) if on_cpu else 1
    usual = 16 if on_cpu else 64
    sequences = given.sequences or (1 if slower > SLOW else usual)

    console = Console()
    flags = ["--device", given.device, "--steps", str(given.steps)]
    flags += ["--sequences", str(sequences), "--micro-batches", str(given.micro_batches)]
    flags += ["--width", str(given.width), "--layers", str(given.layers)]
    flags += ["--recompute"] if given.recompute else []
    runs = {name: [*command, *flags] for name, command in commands(precision).items()}
    reports = run_all(runs, given.steps, console)
    results = {name: Figures(**report) for name, report in reports.items()}

    rows, classes = results["ampfuse"].logits
    title = f"{given.steps} steps of {rows} words out of {classes}, {precision}, {given.device}"
    console.print(table(results, title))
    console.print(gain(results, precision, slower))
    plot(given.out, results, title)
    console.print(f"wrote {given.out}")
    wrong = shortcomings(results, given.steps)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
