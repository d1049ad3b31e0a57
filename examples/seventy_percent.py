"""Cuts the memory of training a language model by more than 70 %, one switch at a time.

    python examples/seventy_percent.py [--width 512] [--layers 12] [--length 512] [--sequences 16]

Each run turns on one switch more than the run before, from plain float32 to everything. The memory
of each is measured, and predicted by ampfuse.memory, which runs no step. The picture shows both.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ampfuse.memory
import torch
from comparison import FLOAT32, Figures, of_this_program, parsed, parser, report, run_all, table
from meter import Meter
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).parent / "language_model"))
import text
from model import LanguageModel

AUTOCAST, LOSS, WEIGHTS, MOMENTS, STOCHASTIC, CHECKPOINTS, MICRO_BATCHES = range(1, 8)
RUNS = (
    FLOAT32,
    "+ bf16 autocast",
    "+ linear loss",
    "+ bf16 weights",
    "+ 8-bit moments",
    "+ stochastic",
    "+ checkpoints",
    "+ micro-batches",
)
AVERAGED = 3  # number of losses in a mean, since those of single batches vary
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Switched(Figures):
    """The measurements of one run, its predicted memory, and its last losses for each seed."""

    predicted_bytes: int
    losses: list[float]


def trained(level: int, given: Any, device: str) -> tuple[LanguageModel, Optimizer, Step]:
    """Return a model, its optimizer and its training step, with the first `level` switches on."""
    model = LanguageModel(
        given.width, given.layers, level >= CHECKPOINTS, given.vocabulary, given.length
    ).to(device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=level >= AUTOCAST)
    optimizer: Optimizer
    if level < WEIGHTS:
        optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    else:
        model.to(torch.bfloat16)
        optimizer = ampfuse.AdamW(
            model.parameters(),
            lr=given.lr,
            master_weights="stochastic" if level >= STOCHASTIC else "remainder",
            state_dtype="8bit" if level >= MOMENTS else torch.float32,
        )

    def loss_of(batch: tuple[Tensor, Tensor], denominator: Tensor | None = None) -> Tensor:
        words, targets = batch
        with autocast:
            hidden = model(words).flatten(0, 1)
            weight = model.embedding.weight
            if level < LOSS:
                return cross_entropy(linear(hidden, weight), targets.flatten())
            return ampfuse.linear_cross_entropy(
                hidden, weight, targets.flatten(), denominator=denominator
            )

    def step(words: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        if level < MICRO_BATCHES:
            loss = loss_of((words, targets))
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            parts = zip(*(torch.split(one, given.micro) for one in (words, targets)), strict=True)
            loss = ampfuse.accumulate(loss_of, parts)
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def train(given: Any) -> Switched:
    """Train with the switches up to one; return what was measured."""
    level, device = RUNS.index(given.only), given.device
    batches = [
        (words.to(device), targets.to(device))
        for words, targets in text.batches(
            torch.load(given.text), given.steps, given.sequences, given.length
        )
    ]
    tiny = argparse.Namespace(vocabulary=64, width=32, length=8, layers=1, micro=1, lr=0.0)
    trained(level, tiny, device)[2](*torch.zeros(2, 2, 8, device=device).long())
    meter = Meter(device)
    losses = []
    # The second seed of float32 shows how much of a difference means nothing.
    for seed in (1, 0) if given.only == FLOAT32 else (0,):
        torch.manual_seed(seed)
        model, optimizer, step = trained(level, given, device)
        meter.start()
        of_steps = []
        for words, targets in batches:
            of_steps.append(step(words, targets))
            meter.lap()
        losses.append(torch.stack(of_steps)[-AVERAGED:].mean().item())
    meter.begin_memory()
    for words, targets in batches[:2]:
        step(words, targets)
    peak = meter.peak()

    model, optimizer, step = trained(level, given, "cpu")
    words, targets = (tensor.cpu() for tensor in batches[0])
    account = ampfuse.memory.account(model, optimizer, lambda: step(words, targets), device=device)
    return Switched(meter.seconds, peak, account.peak, losses)


def cut(results: Mapping[str, Switched]) -> float:
    """Return by which part of float32's memory the last run takes less."""
    return 1 - results[RUNS[-1]].peak_bytes / results[FLOAT32].peak_bytes


def agreement(results: Mapping[str, Switched]) -> str:
    """Compare the differences of the last losses with that between two seeds of float32."""
    other_seed, reference = results[FLOAT32].losses
    apart = max(abs(one.losses[-1] - reference) for one in results.values())
    noise = abs(other_seed - reference)
    same = "stays the same" if apart <= noise else "does not stay the same"
    return (
        f"The loss {same}: the mean of the last {AVERAGED} differs by up to {apart:.3f} from "
        f"float32's {reference:.3f}, and another seed makes it differ by {noise:.3f}."
    )


def error(results: Mapping[str, Switched]) -> str:
    """Describe how far the measurements are from the predictions."""
    more = [(one.peak_bytes - one.predicted_bytes) / 2**20 for one in results.values()]
    return (
        f"Measured memory is {min(more):+.0f} to {max(more):+.0f} MiB from what is predicted. "
        "Predictions are of tensors, and on a CPU the process takes more."
    )


def plot(path: Path, results: Mapping[str, Switched], title: str) -> None:
    """Draw the memory of each run, and on top of it what its switch has saved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    peaks = [one.peak_bytes / 2**20 for one in results.values()]
    axes.bar(RUNS, peaks, color="#5b7c99", label="measured")
    for place, (before, after) in enumerate(pairwise(peaks), 1):
        axes.bar(place, before - after, bottom=after, color="#f3d3c6")
        label = f"{after / before - 1:+.0%}"
        if place == len(peaks) - 1:
            label = f"{after / peaks[0] - 1:+.0%} in total\n{label}"
        axes.text(place, max(before, after), label, ha="center", va="bottom")
    for place, peak in enumerate(peaks):
        axes.text(place, peak / 4, f"{peak:.0f}", ha="center", color="white")
    predicted = [one.predicted_bytes / 2**20 for one in results.values()]
    axes.scatter(RUNS, predicted, color="#d9542b", zorder=3, label="predicted by ampfuse.memory")
    axes.set_ylabel("peak memory, MiB")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Make the runs, and compare them."""
    options = parser(__doc__, "seventy_percent.png", RUNS)
    options.set_defaults(precision="bfloat16")
    options.add_argument("--vocabulary", type=int, default=16_384)
    options.add_argument("--width", type=int, default=128, help="a multiple of 32")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--length", type=int, default=128, help="words in a sequence")
    options.add_argument("--sequences", type=int, default=16, help="in a step")
    options.add_argument("--micro", type=int, default=4, help="sequences in a micro-batch")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--lr", type=float, default=2e-3)
    options.add_argument("--text", type=Path, help=argparse.SUPPRESS)  # the words, read only once
    given = parsed(options)
    if given.precision != "bfloat16":
        options.error("--precision: expected bfloat16, since the weights are bfloat16")
    if given.only:
        report(train(given), given.report)
        return 0

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "words.pt"
        torch.save(text.words(given.vocabulary), words)
        commands = of_this_program(RUNS)
        runs = {name: [*command, "--text", str(words)] for name, command in commands.items()}
        results = {
            name: Switched(**figures)
            for name, figures in run_all(runs, given.steps, console).items()
        }
    rows = given.sequences * given.length
    title = f"{rows} words out of {given.vocabulary}, {given.layers} layers, {given.device}"
    more = {
        "predicted": [f"{one.predicted_bytes / 2**20:.0f}" for one in results.values()],
        "loss": [f"{one.losses[-1]:.3f}" for one in results.values()],
    }
    console.print(table(results, title, "step", more))
    peaks = [f"{results[name].peak_bytes / 2**20:.0f} MiB" for name in (FLOAT32, RUNS[-1])]
    total = f"{cut(results):.0%} less memory: from {peaks[0]} to {peaks[1]}"
    seconds = results[RUNS[-1]].seconds / results[FLOAT32].seconds
    console.print(
        f"{total}. A step takes {seconds:.2f} times as long.", agreement(results), error(results)
    )
    plot(given.out, results, f"{total}, one switch at a time\n{title}")
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
